//! The settings of RDMA devices: the names that operators know, and the defaults.

use super::tests::{NO_NUMBER, NO_STRING, Sample, environment, sample, section};
use super::*;

/// Every variable besides those of this crate, with its key.
const KNOWN: &[(&str, &str)] = &[
    ("RDMA_DEVICE", "rdma_device"),
    ("RDMA_DEVICE_PORT", "rdma_device_port"),
    ("RDMA_GID_INDEX", "rdma_gid_index"),
    ("RDMA_QP_PKEY_INDEX", "rdma_qp_pkey_index"),
    ("RDMA_PKEY", "rdma_qp_pkey_index"),
    ("RDMA_QP_QUEUE_DEPTH", "rdma_qp_queue_depth"),
    ("RDMA_QUEUE_DEPTH", "rdma_qp_queue_depth"),
    ("RDMA_QP_TIMEOUT", "rdma_qp_timeout"),
    ("RDMA_TIMEOUT", "rdma_qp_timeout"),
    ("RDMA_QP_RETRY_COUNT", "rdma_qp_retry_count"),
    ("RDMA_RETRY_CNT", "rdma_qp_retry_count"),
    ("RDMA_QP_RNR_RETRY", "rdma_qp_rnr_retry"),
    ("RDMA_QP_MIN_RNR_TIMER", "rdma_qp_min_rnr_timer"),
    ("RDMA_QP_SL", "rdma_qp_sl"),
    ("RDMA_SL", "rdma_qp_sl"),
    ("RDMA_QP_MTU", "rdma_qp_mtu"),
    ("RDMA_MTU", "rdma_qp_mtu"),
    ("RDMA_TRAFFIC_CLASS", "rdma_traffic_class"),
    ("RDMA_QPS_PER_PEER", "rdma_qps_per_peer"),
    ("RDMA_RELAXED_ORDERING", "rdma_relaxed_ordering"),
];

pub(super) const SAMPLES: &[Sample] = &[
    sample(
        "rdma_device",
        &[
            ("mlx5_0", "mlx5_0"),
            ("rocep59s0f0", "rocep59s0f0"),
            ("auto", "auto"),
            ("mlx5_0, mlx5_1", "mlx5_0,mlx5_1"),
        ],
        &["", ".", "..", "a/b", "a b", "a\tb", "m\u{f6}", "a,", "a,,b", "a,b,a", "a,auto", "a,b,c,d,e"],
        NO_STRING,
    ),
    sample("rdma_device_port", &[("1", "1"), ("255", "255")], &["", "0", "256", "-1", "one"], NO_NUMBER),
    sample("rdma_gid_index", &[("0", "0"), ("255", "255")], &["", "256", "-1", "first"], NO_NUMBER),
    sample(
        "rdma_qp_pkey_index",
        &[("0", "0"), ("65535", "65535")],
        &["", "65536", "-1", "0xffff"],
        NO_NUMBER,
    ),
    sample(
        "rdma_qp_queue_depth",
        &[("1", "1"), ("2147483647", "2147483647")],
        &["", "0", "2147483648", "-1", "1k"],
        NO_NUMBER,
    ),
    sample("rdma_qp_timeout", &[("0", "0"), ("31", "31")], &["", "32", "-1", "14ms"], NO_NUMBER),
    sample("rdma_qp_retry_count", &[("0", "0"), ("7", "7")], &["", "8", "-1", "ever"], NO_NUMBER),
    sample("rdma_qp_min_rnr_timer", &[("0", "0"), ("31", "31")], &["", "32", "-1", "22us"], NO_NUMBER),
    sample("rdma_qps_per_peer", &[("1", "1"), ("16", "16")], &["", "0", "17", "all"], NO_NUMBER),
    sample("rdma_relaxed_ordering", &[("true", "true"), ("false", "false")], &["", "yes", "1"], &["1", "[]"]),
    sample("rdma_memory_windows", &[("on", "on"), ("off", "off")], &["", "true", "On", "1"], NO_STRING),
    sample("rdma_qp_rnr_retry", &[("0", "0"), ("7", "7")], &["", "8", "-1", "ever"], NO_NUMBER),
    sample("rdma_qp_sl", &[("0", "0"), ("7", "7")], &["", "8", "-1", "x"], NO_NUMBER),
    sample(
        "rdma_qp_mtu",
        &[("256", "256"), ("512", "512"), ("1024", "1024"), ("2048", "2048"), ("4096", "4096")],
        &["", "0", "1", "1000", "1500", "8192", "4KiB"],
        NO_NUMBER,
    ),
    sample("rdma_traffic_class", &[("0", "0"), ("255", "255")], &["", "256", "-1", "0x20"], NO_NUMBER),
    sample("rdma_registrations", &[("0", "0"), ("65536", "65536")], &["", "65537", "-1", "all"], NO_NUMBER),
    sample(
        "rdma_registered_bytes",
        &[("0", "0"), ("1GiB", "1GiB"), ("16TiB", "16TiB")],
        &["", "17TiB", "-1", "1GB", "much"],
        &["true", "1.5", "[1]"],
    ),
];

/// A value that the key allows.
fn fine(key: &str) -> &'static str {
    match key {
        "rdma_qp_mtu" => "1024",
        "rdma_relaxed_ordering" => "true",
        _ => "5",
    }
}

fn with(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let builder = Config::builder().environment(environment(pairs));
    builder.member("worker", 0).set("cluster", "worker=127.0.0.1:1").build()
}

fn refused(pairs: &[(&str, &str)]) -> String {
    with(pairs).expect_err("refused").to_string()
}

#[test]
fn each_name_that_operators_know_sets_its_key_and_is_named_as_its_origin() {
    for (variable, key) in KNOWN {
        // A port is one of a device.
        let (text, device) = (fine(key), ("TENSORWIRE_RDMA_DEVICE", "5"));
        let pairs =
            if *key == "rdma_device" { vec![(*variable, text)] } else { vec![device, (*variable, text)] };
        let config = with(&pairs).unwrap_or_else(|error| panic!("{variable}: {error}"));
        let entries = config.entries();
        let (_, value) = entries.iter().find(|(name, _)| name == key).expect(key);
        assert_eq!(value.as_deref(), Some(text), "{variable}");
        assert_eq!(config.origin(key).to_string(), format!("environment variable {variable}"));
    }
}

#[test]
fn no_other_variable_is_looked_up_than_those_of_the_reference() {
    let reference = reference();
    for (variable, key) in KNOWN {
        let section = section(&reference, key);
        assert!(section.contains(&format!("`{variable}`")), "{section}");
    }
    let named = reference.matches("`RDMA_").count();
    assert_eq!(named, KNOWN.len(), "a name that this test does not know is in the reference");
}

#[test]
fn the_defaults_are_those_that_operators_know() {
    let config = with(&[]).expect("defaults");
    assert_eq!((&config.rdma_device, config.rdma_device_port, config.rdma_gid_index), (&None, None, None));
    assert_eq!((config.rdma_qp_pkey_index, config.rdma_qp_queue_depth, config.rdma_qp_mtu), (0, 1024, None));
    assert_eq!((config.rdma_qp_timeout, config.rdma_qp_retry_count, config.rdma_qp_rnr_retry), (14, 7, 6));
    assert_eq!((config.rdma_qp_sl, config.rdma_traffic_class), (0, 0));
    assert_eq!(config.origin("rdma_qp_timeout"), Origin::Default);
    assert_eq!(config.origin("rdma_device"), Origin::Default);
}

#[test]
fn a_value_that_is_no_number_or_out_of_range_stops_the_start_with_one_line() {
    assert_eq!(
        refused(&[("RDMA_QP_TIMEOUT", "soon")]),
        "rdma_qp_timeout is \"soon\" (environment variable RDMA_QP_TIMEOUT): it must be 0 to 31"
    );
    assert_eq!(
        refused(&[("RDMA_RETRY_CNT", "8")]),
        "rdma_qp_retry_count is \"8\" (environment variable RDMA_RETRY_CNT): it must be 0 to 7"
    );
    assert_eq!(
        refused(&[("RDMA_MTU", "1500")]),
        "rdma_qp_mtu is \"1500\" (environment variable RDMA_MTU): it must be 256, 512, 1024, 2048 or 4096, \
         at most the port's active MTU"
    );
}

#[test]
fn two_names_of_one_setting_must_agree() {
    assert_eq!(with(&[("RDMA_QP_SL", "3"), ("RDMA_SL", "3")]).expect("the same").rdma_qp_sl, 3);
    assert_eq!(
        refused(&[("RDMA_QP_SL", "3"), ("RDMA_SL", "4")]),
        "rdma_qp_sl is \"4\" (environment variable RDMA_SL): RDMA_QP_SL is \"3\" and sets the same: unset \
         one of them"
    );
    assert_eq!(
        refused(&[("TENSORWIRE_RDMA_GID_INDEX", "1"), ("RDMA_GID_INDEX", "2")]),
        "rdma_gid_index is \"2\" (environment variable RDMA_GID_INDEX): TENSORWIRE_RDMA_GID_INDEX is \"1\" \
         and sets the same: unset one of them"
    );
}

#[test]
fn where_a_value_comes_from_makes_no_difference_between_two_configurations() {
    let builder =
        || Config::builder().without_environment().member("worker", 0).set("cluster", "worker=127.0.0.1:1");
    let said = builder().rdma_qp_sl(2).build().expect("config");
    assert_eq!(said.origin("rdma_qp_sl"), Origin::Builder);
    assert_eq!(said, with(&[("RDMA_SL", "2")]).expect("config"));
}
