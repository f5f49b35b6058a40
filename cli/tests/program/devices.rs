//! `tensorwire devices` as a user runs it, on folders that are laid out like `/sys` and `/dev`.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// A made-up machine.
struct Machine(TempDir);

impl Machine {
    fn new() -> Self {
        Machine(tempfile::tempdir().expect("a folder"))
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, format!("{text}\n")).expect("a file");
    }

    /// A channel adapter with a file in `/dev`.
    fn device(&self, name: &str, uverbs: u32) {
        self.put(&format!("sys/class/infiniband/{name}/node_type"), "1: CA");
        self.put(&format!("sys/class/infiniband/{name}/fw_ver"), "16.35.4030");
        self.put(&format!("sys/class/infiniband/{name}/device/numa_node"), "1");
        self.put(&format!("sys/class/infiniband_verbs/uverbs{uverbs}/ibdev"), name);
        self.put(&format!("dev/infiniband/uverbs{uverbs}"), "");
    }

    fn port(&self, device: &str, port: u8, state: &str, link: &str, lid: &str) {
        let put = |file: &str, text: &str| {
            self.put(&format!("sys/class/infiniband/{device}/ports/{port}/{file}"), text);
        };
        put("state", state);
        put("phys_state", if state.contains("ACTIVE") { "5: LinkUp" } else { "3: Disabled" });
        put("link_layer", link);
        put("rate", "100 Gb/sec (4X EDR)");
        put("lid", lid);
        put("pkeys/0", "0xffff");
        for index in 0..8 {
            put(&format!("gids/{index}"), "0000:0000:0000:0000:0000:0000:0000:0000");
        }
    }

    fn gid(&self, device: &str, port: u8, index: u32, gid: &str, kind: &str, interface: &str) {
        let folder = format!("sys/class/infiniband/{device}/ports/{port}");
        self.put(&format!("{folder}/gids/{index}"), gid);
        self.put(&format!("{folder}/gid_attrs/types/{index}"), kind);
        if !interface.is_empty() {
            self.put(&format!("{folder}/gid_attrs/ndevs/{index}"), interface);
            self.put(&format!("sys/class/net/{interface}/mtu"), "9000");
        }
    }

    /// A RoCE NIC with a sparse GID table.
    fn roce(&self, device: &str, uverbs: u32) {
        self.device(device, uverbs);
        self.port(device, 1, "4: ACTIVE", "Ethernet", "0x0");
        self.gid(device, 1, 2, "fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "IB/RoCE v1", "ens1");
        self.gid(device, 1, 5, "0000:0000:0000:0000:0000:ffff:0a01:0203", "RoCE v2", "ens1");
    }

    fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
        let at = |folder: &str| self.0.path().join(folder);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tensorwire"));
        command.arg("devices").arg("--sysfs").arg(at("sys")).arg("--dev").arg(at("dev")).args(arguments);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().contains("RDMA_") {
                command.env_remove(name);
            }
        }
        command.envs(variables.iter().copied()).output().expect("the program starts")
    }

    /// The output of `--json`.
    fn json(&self, variables: &[(&str, &str)]) -> Value {
        let output = self.run(&["--json"], variables);
        let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let clear = value["obstacles"].as_array().expect("a list").is_empty();
        assert_eq!(output.status.code(), Some(i32::from(!clear)), "{value}");
        value
    }

    /// The only obstacle, apart from a missing libibverbs.
    fn obstacle(&self, variables: &[(&str, &str)]) -> String {
        let value = self.json(variables);
        let obstacles = value["obstacles"].as_array().expect("a list").iter();
        let mut texts = obstacles.map(|obstacle| obstacle.as_str().expect("a text").to_string());
        let text = texts.next().unwrap_or_default();
        assert!(texts.all(|text| text.contains("libibverbs")), "{value}");
        text
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_roce_nic_is_shown_with_what_would_be_chosen_and_why() {
    let machine = Machine::new();
    machine.roce("mlx5_0", 0);
    let shown = text(&machine.run(&[], &[]).stdout);
    for line in [
        "  port 1: ACTIVE (LinkUp), Ethernet, 100 Gb/s (4X EDR)\n",
        "; interface ens1 has 9000\n",
        "    P_Keys (1 of 1): 0 (0xffff)\n",
        "    GIDs (2 of 8):\n",
        "          2  fe80::e42:a1ff:fe00:1  RoCE v1       ens1\n",
        "          5  10.1.2.3               RoCE v2       ens1\n",
        "chosen: device mlx5_0 (the only one with an active port), port 1 (the only active one), \
         GID 5 (10.1.2.3, RoCE v2, ens1): the first of RoCE v2 with an IPv4 address\n",
    ] {
        assert!(shown.contains(line), "{line:?} is not in:\n{shown}");
    }
    assert!(shown.starts_with("mlx5_0: channel adapter, firmware 16.35.4030, NUMA node 1, "), "{shown}");

    let value = machine.json(&[]);
    let port = &value["devices"][0]["ports"][0];
    assert_eq!((&port["state"], &port["gids"][1]["index"]), (&"ACTIVE".into(), &5.into()));
    assert_eq!(port["speed"]["megabits_per_second"], 100_000);
    assert_eq!(
        (&value["devices"][0]["numa_node"], &value["choice"]["gid"]["gid"]),
        (&1.into(), &"::ffff:10.1.2.3".into())
    );
    assert_eq!((&value["choice"]["port"], &value["choice"]["global_header"]), (&1.into(), &true.into()));
}

#[test]
fn an_infiniband_port_is_shown_with_its_lid() {
    let machine = Machine::new();
    machine.device("mlx5_0", 0);
    machine.port("mlx5_0", 1, "2: INIT", "InfiniBand", "0x0");
    machine.port("mlx5_0", 2, "4: ACTIVE", "InfiniBand", "0x2b");
    machine.gid("mlx5_0", 2, 0, "fe80:0000:0000:0000:506b:4b03:0000:0002", "IB/RoCE v1", "");
    let shown = text(&machine.run(&[], &[]).stdout);
    assert!(shown.contains("  port 1: INIT (Disabled), InfiniBand, 100 Gb/s (4X EDR)\n"), "{shown}");
    assert!(
        shown.contains("  port 2: ACTIVE (LinkUp), InfiniBand, 100 Gb/s (4X EDR), lid 0x2b\n"),
        "{shown}"
    );
    assert!(
        shown.contains("port 2 (the only active one), lid 0x2b, GID 0 (fe80::506b:4b03:0:2, InfiniBand)"),
        "{shown}"
    );
    assert!(shown.contains("packets without a global header\n"), "{shown}");
}

#[test]
fn the_settings_of_the_environment_and_of_a_file_count() {
    let machine = Machine::new();
    machine.roce("mlx5_0", 0);
    machine.roce("mlx5_10", 1);
    machine.roce("mlx5_2", 2);
    let why = machine.obstacle(&[]);
    assert_eq!(
        why,
        "3 RDMA devices have an active port: name one of them with rdma_device (RDMA_DEVICE), or set it \
         to auto for all; there is \
         mlx5_0 (port 1 ACTIVE Ethernet), mlx5_2 (port 1 ACTIVE Ethernet), mlx5_10 (port 1 ACTIVE Ethernet)"
    );
    assert_eq!(machine.json(&[])["choice"], Value::Null);
    let value = machine.json(&[
        ("RDMA_DEVICE", "mlx5_2"),
        ("RDMA_DEVICE_PORT", "1"),
        ("TENSORWIRE_RDMA_GID_INDEX", "2"),
    ]);
    let choice = &value["choice"];
    assert_eq!((&choice["device"], &choice["gid"]["index"]), (&"mlx5_2".into(), &2.into()));
    assert_eq!(choice["device_reason"], "asked for by environment variable RDMA_DEVICE");
    assert_eq!(choice["gid_reason"], "asked for by environment variable TENSORWIRE_RDMA_GID_INDEX");

    let file = machine.0.path().join("settings.toml");
    fs::write(&file, "pool_size = '64MiB'\nrdma_device = 'mlx5_10'\nworld_size = 8\n").expect("a file");
    let shown = text(&machine.run(&["--config", file.to_str().expect("a path")], &[]).stdout);
    assert!(shown.contains("chosen: device mlx5_10 (asked for by file "), "{shown}");
    assert!(shown.contains("settings.toml line 2)"), "{shown}");
}

#[test]
fn what_the_device_does_not_offer_is_refused_with_what_it_offers() {
    let machine = Machine::new();
    machine.roce("mlx5_0", 0);
    assert_eq!(
        machine.obstacle(&[("RDMA_GID_INDEX", "3")]),
        "rdma_gid_index is \"3\" (environment variable RDMA_GID_INDEX): it must be 0 to 7, an entry that \
         is not empty; that entry is empty; the GID table of port 1 of mlx5_0 has \
         2 (fe80::e42:a1ff:fe00:1, RoCE v1, ens1), 5 (10.1.2.3, RoCE v2, ens1)"
    );
    let output = machine.run(&[], &[("RDMA_DEVICE", "mlx4_0")]);
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(
        said.starts_with(
            "error: rdma_device is \"mlx4_0\" (environment variable RDMA_DEVICE): there is no such RDMA \
             device; there is mlx5_0 (port 1 ACTIVE Ethernet)"
        ),
        "{said}"
    );
    let shown = text(&output.stdout);
    assert!(shown.starts_with("mlx5_0: ") && !shown.contains("chosen"), "shown all the same: {shown}");
}

#[test]
fn a_setting_that_can_never_be_is_a_mistake_of_the_command() {
    let machine = Machine::new();
    machine.roce("mlx5_0", 0);
    let output = machine.run(&[], &[("RDMA_TIMEOUT", "32")]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        text(&output.stderr),
        "error: rdma_qp_timeout is \"32\" (environment variable RDMA_TIMEOUT): it must be 0 to 31\n"
    );
    // Other settings are ignored.
    assert_eq!(machine.json(&[("TENSORWIRE_POLLERS", "many")])["choice"]["device"], "mlx5_0");
}

#[test]
fn a_machine_without_devices_gets_a_clear_line() {
    let machine = Machine::new();
    let why = machine.obstacle(&[]);
    assert!(why.starts_with("there is no RDMA device, nor the kernel's part for them ("), "{why}");
    assert!(why.contains("class/infiniband is not there): load the driver of the NIC"), "{why}");
    fs::create_dir_all(machine.0.path().join("sys/class/infiniband")).expect("a folder");
    let why = machine.obstacle(&[]);
    assert!(why.starts_with("there is no RDMA device: load the driver of the NIC"), "{why}");
    let output = machine.run(&[], &[]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), String::new()));
    assert_eq!(text(&output.stderr).lines().count(), 1);
}

#[test]
fn a_device_that_this_process_may_not_use_is_named_with_its_file() {
    let machine = Machine::new();
    machine.roce("mlx5_0", 0);
    let file = machine.0.path().join("dev/infiniband/uverbs0");
    fs::remove_file(&file).expect("removed");
    let why = machine.obstacle(&[]);
    assert!(why.starts_with("mlx5_0 can't be used by this process: "), "{why}");
    assert!(why.contains("infiniband/uverbs0: No such file or directory"), "{why}");
    fs::remove_dir_all(machine.0.path().join("sys/class/infiniband_verbs")).expect("removed");
    let why = machine.obstacle(&[]);
    assert_eq!(why, "mlx5_0 can't be used by any program: the kernel's module ib_uverbs is not loaded");
}

#[test]
fn the_devices_of_this_machine_are_shown_or_their_absence_is_said() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_tensorwire")).arg("devices").output().expect("the program starts");
    let (shown, said) = (text(&output.stdout), text(&output.stderr));
    if Path::new("/sys/class/infiniband").is_dir() {
        assert!(!shown.is_empty() || said.contains("there is no RDMA device"), "{shown}{said}");
    } else {
        assert!(said.contains("there is no RDMA device, nor the kernel's part for them"), "{said}");
    }
}
