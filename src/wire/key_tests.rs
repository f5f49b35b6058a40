//! Valid and invalid rendezvous keys.

use super::*;
use proptest::prelude::*;

const KEY: &str = "/job:worker/replica:0/task:1/device:CPU:0;0000000000000b5c;\
                   /job:ps/replica:0/task:0/device:CPU:0;grad/w1;0:0";

fn error(key: &str) -> String {
    RendezvousKey::parse(key).expect_err("refused").to_string()
}

#[test]
fn the_key_of_the_specification_is_read() {
    let cpu = |job, task| DeviceName { job, replica: 0, task, kind: "CPU", number: 0 };
    let expected = RendezvousKey {
        source: cpu("worker", 1),
        source_incarnation: 0xb5c,
        destination: cpu("ps", 0),
        edge: "grad/w1",
        frame: 0,
        iteration: 0,
    };
    assert_eq!(RendezvousKey::parse(KEY), Ok(expected));
    assert_eq!(expected.to_string(), KEY);
    assert_eq!(expected.check(), Ok(()));
}

#[test]
fn every_part_is_borrowed_from_the_text() {
    let text = KEY.to_string();
    let key = RendezvousKey::parse(&text).expect("key");
    for part in [key.source.job, key.source.kind, key.destination.job, key.destination.kind, key.edge] {
        assert!(text.as_bytes().as_ptr_range().contains(&part.as_ptr()), "{part}");
    }
}

/// One wrong part each: a part of the good key, its replacement, and the end of the error.
const WRONG: &[(&str, &str, KeyPart, &str)] = &[
    (
        ";0:0",
        "",
        KeyPart::Whole,
        "5 parts between ';' are needed, not 4: SOURCE;INCARNATION;DESTINATION;EDGE;FRAME:ITERATION",
    ),
    (
        "w1",
        "w;1",
        KeyPart::Whole,
        "5 parts between ';' are needed, not 6: SOURCE;INCARNATION;DESTINATION;EDGE;FRAME:ITERATION",
    ),
    (
        "/job:worker",
        "job:worker",
        KeyPart::Source,
        "\"job:worker/replica:0/task:1/device:CPU:0\" has no '/job:' where it must be: \
         /job:J/replica:R/task:T/device:TYPE:N",
    ),
    (
        "/replica:0/task:1",
        "/task:1",
        KeyPart::Source,
        "\"/job:worker/task:1/device:CPU:0\" has no '/replica:' where it must be: \
         /job:J/replica:R/task:T/device:TYPE:N",
    ),
    (
        "CPU:0;00",
        "CPU:0/x;00",
        KeyPart::Source,
        "\"/job:worker/replica:0/task:1/device:CPU:0/x\" has \"/x\" after the device",
    ),
    ("CPU:0;00", "CPU;00", KeyPart::Source, "device \"CPU\" must be TYPE:NUMBER"),
    (
        "CPU:0;00",
        "cpu:0;00",
        KeyPart::Source,
        "device type \"cpu\" must be upper-case letters, digits and '_', a letter first",
    ),
    (
        "CPU:0;00",
        ":0;00",
        KeyPart::Source,
        "device type \"\" must be upper-case letters, digits and '_', a letter first",
    ),
    (
        "CPU:0;00",
        "CPU:;00",
        KeyPart::Source,
        "device number \"\" must be a decimal number from 0 to 4294967295 without sign or leading zeros",
    ),
    (
        "worker",
        "-worker",
        KeyPart::Source,
        "job \"-worker\" must be 1 to 64 letters, digits, '_' and '-', a letter or digit first",
    ),
    (
        "worker",
        "w\u{f6}rk",
        KeyPart::Source,
        "job \"w\u{f6}rk\" must be 1 to 64 letters, digits, '_' and '-', a letter or digit first",
    ),
    (
        "worker",
        "",
        KeyPart::Source,
        "job \"\" must be 1 to 64 letters, digits, '_' and '-', a letter or digit first",
    ),
    (
        "task:1",
        "task:01",
        KeyPart::Source,
        "task \"01\" must be a decimal number from 0 to 4294967295 without sign or leading zeros",
    ),
    (
        "task:1",
        "task:+1",
        KeyPart::Source,
        "task \"+1\" must be a decimal number from 0 to 4294967295 without sign or leading zeros",
    ),
    (
        "replica:0/task:1",
        "replica:4294967296/task:1",
        KeyPart::Source,
        "replica \"4294967296\" must be a decimal number from 0 to 4294967295 without sign or leading zeros",
    ),
    ("0000000000000b5c", "b5c", KeyPart::SourceIncarnation, "\"b5c\" must be 16 lower-case hex digits"),
    (
        "0000000000000b5c",
        "0000000000000B5C",
        KeyPart::SourceIncarnation,
        "\"0000000000000B5C\" must be 16 lower-case hex digits",
    ),
    (
        "0000000000000b5c",
        "+000000000000b5c",
        KeyPart::SourceIncarnation,
        "\"+000000000000b5c\" must be 16 lower-case hex digits",
    ),
    (
        "job:ps",
        "job:p s",
        KeyPart::Destination,
        "job \"p s\" must be 1 to 64 letters, digits, '_' and '-', a letter or digit first",
    ),
    ("grad/w1", "", KeyPart::Edge, "a name of 0 bytes: 1 to 2048 are allowed"),
    (
        "grad/w1",
        "grad\nw1",
        KeyPart::Edge,
        "it has '\\n' at byte 4: neither ';' nor control characters are allowed",
    ),
    (
        "grad/w1",
        "grad\u{85}w1",
        KeyPart::Edge,
        "it has '\\u{85}' at byte 4: neither ';' nor control characters are allowed",
    ),
    (";0:0", ";0", KeyPart::Frame, "\"0\" must be FRAME:ITERATION"),
    (
        ";0:0",
        ";00:0",
        KeyPart::Frame,
        "\"00\" must be a decimal number from 0 to 18446744073709551615 without sign or leading zeros",
    ),
    (
        ";0:0",
        ";0:0:0",
        KeyPart::Iteration,
        "\"0:0\" must be a decimal number from 0 to 18446744073709551615 without sign or leading zeros",
    ),
    (
        ";0:0",
        ";0:-1",
        KeyPart::Iteration,
        "\"-1\" must be a decimal number from 0 to 18446744073709551615 without sign or leading zeros",
    ),
    (
        ";0:0",
        ";0:18446744073709551616",
        KeyPart::Iteration,
        "\"18446744073709551616\" must be a decimal number from 0 to 18446744073709551615 without sign or \
         leading zeros",
    ),
];

#[test]
fn each_wrong_part_is_named_with_the_reason() {
    for (good, bad, part, why) in WRONG {
        let key = KEY.replacen(good, bad, 1);
        assert_ne!(key, KEY, "{good} is in the key");
        let error = RendezvousKey::parse(&key).expect_err(&key);
        assert_eq!((error.part, error.why.as_str()), (*part, *why), "{key}");
    }
}

#[test]
fn an_error_quotes_the_key() {
    assert_eq!(
        error("grad/w1"),
        "bad rendezvous key \"grad/w1\": key: 5 parts between ';' are needed, not 1: \
         SOURCE;INCARNATION;DESTINATION;EDGE;FRAME:ITERATION"
    );
    let key = KEY.replace("0000000000000b5c", "b5c");
    assert_eq!(
        error(&key),
        format!("bad rendezvous key \"{key}\": source incarnation: \"b5c\" must be 16 lower-case hex digits")
    );
}

#[test]
fn a_huge_key_is_quoted_by_its_ends() {
    let key = KEY.replace("grad", &"\u{e9}".repeat(500_000));
    let error = error(&key);
    assert!(error.len() < 400, "{error}");
    assert!(
        error.contains("\"/job:worker/replica:0") && error.contains("/w1;0:0\" (1000104 bytes)"),
        "{error}"
    );
    assert!(error.ends_with("edge name: a name of 1000003 bytes: 1 to 2048 are allowed"), "{error}");
}

#[test]
fn names_go_to_2048_bytes_and_no_further() {
    let edge = |bytes: usize| KEY.replace("grad/w1", &"e".repeat(bytes));
    assert!(RendezvousKey::parse(&edge(2048)).is_ok());
    assert!(error(&edge(2049)).ends_with("edge name: a name of 2049 bytes: 1 to 2048 are allowed"));

    let rest = "/job:w/replica:0/task:0/device::0".len();
    let device = |bytes: usize| format!("/job:w/replica:0/task:0/device:{}:0", "K".repeat(bytes - rest));
    let long = device(2048);
    assert_eq!(DeviceName::parse(&long).expect("2048 bytes").check(), Ok(()));
    let error = DeviceName::parse(&device(2049)).expect_err("2049 bytes");
    assert_eq!(error.why, "a device name of 2049 bytes is too long: at most 2048 are allowed");
}

#[test]
fn a_key_from_bad_parts_is_caught_by_check() {
    let good = RendezvousKey::parse(KEY).expect("key");
    let part = |key: RendezvousKey<'_>| key.check().expect_err("refused").part;
    assert_eq!(part(RendezvousKey { edge: "a;b", ..good }), KeyPart::Edge);
    assert_eq!(
        part(RendezvousKey { source: DeviceName { job: "a/b", ..good.source }, ..good }),
        KeyPart::Source
    );
    let long = "J".repeat(2048);
    let destination = DeviceName { kind: &long, ..good.destination };
    assert_eq!(part(RendezvousKey { destination, ..good }), KeyPart::Destination);
    assert_eq!(
        DeviceName { kind: "gpu", ..good.source }.check().expect_err("refused").to_string(),
        "bad device name \"/job:worker/replica:0/task:1/device:gpu:0\": device type \"gpu\" must be \
         upper-case letters, digits and '_', a letter first"
    );
}

type Device = (String, u32, u32, String, u32);

fn device() -> impl Strategy<Value = Device> {
    ("[A-Za-z0-9][A-Za-z0-9_-]{0,8}", any::<u32>(), any::<u32>(), "[A-Z][A-Z0-9_]{0,8}", any::<u32>())
}

fn named((job, replica, task, kind, number): &Device) -> DeviceName<'_> {
    DeviceName { job, replica: *replica, task: *task, kind, number: *number }
}

prop_compose! {
    fn valid()(source in device(), destination in device(), edge in "[^;\\p{Cc}]{1,24}",
               source_incarnation: u64, frame: u64, iteration: u64) -> String {
        let (source, destination) = (named(&source), named(&destination));
        let key = RendezvousKey { source, source_incarnation, destination, edge: &edge, frame, iteration };
        assert_eq!(key.check(), Ok(()));
        let text = key.to_string();
        assert_eq!(RendezvousKey::parse(&text), Ok(key));
        text
    }
}

proptest! {
    #[test]
    fn a_key_is_written_and_read_back(text in valid()) {
        let key = RendezvousKey::parse(&text).expect("valid");
        prop_assert_eq!(key.to_string(), text);
    }

    #[test]
    fn any_text_is_refused_or_written_back_the_same(text in "\\PC*|[/:;a-zA-Z0-9\\x00]*") {
        match RendezvousKey::parse(&text) {
            Ok(key) => prop_assert_eq!(key.to_string(), text),
            Err(error) => prop_assert!(!error.why.is_empty()),
        }
    }

    #[test]
    fn a_changed_key_is_refused_or_another_key_with_one_spelling(
        text in valid(), at: prop::sample::Index, with in "[0-9a-zA-Z/:;+ \\x00]{0,2}", cut in 0usize..2,
    ) {
        let at = text.floor_char_boundary(at.index(text.len()));
        let end = text.ceil_char_boundary((at + cut).min(text.len()));
        let changed = format!("{}{with}{}", &text[..at], &text[end..]);
        if let Ok(key) = RendezvousKey::parse(&changed) {
            prop_assert_eq!(&key.to_string(), &changed);
            prop_assert_eq!(key.check(), Ok(()));
        }
    }
}
