//! Hosts on a bridge, each a network namespace. They end with their processes.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A bridge with hosts. The bridge is in a namespace of its own.
pub struct Network {
    switch: Namespace,
    hosts: Vec<Namespace>,
}

/// A network namespace, which lives as long as its keeper.
struct Namespace {
    keeper: Child,
}

impl Namespace {
    /// A namespace with its own /dev/shm, as a host has, or with that of the test, as containers
    /// may have.
    fn new(has_own_files: bool) -> Option<Namespace> {
        let mut keeper = Command::new("unshare");
        let sleep = match has_own_files {
            true => "mount -t tmpfs tmpfs /dev/shm && exec sleep 3600",
            false => "exec sleep 3600",
        };
        keeper.args(["--net", "--mount", "sh", "-c", sleep]).stdin(Stdio::null()).stderr(Stdio::null());
        let mut namespace = Namespace { keeper: keeper.spawn().ok()? };
        // The namespace is made once the keeper has become sleep(1).
        let name = format!("/proc/{}/comm", namespace.keeper.id());
        let began = Instant::now();
        while std::fs::read_to_string(&name).unwrap_or_default().trim() != "sleep" {
            let has_failed = namespace.keeper.try_wait().is_ok_and(|status| status.is_some());
            if has_failed || began.elapsed() > Duration::from_secs(10) {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        namespace.ip("link set lo up").ok()?;
        Some(namespace)
    }

    /// The words that start a program here.
    fn starter(&self) -> [String; 6] {
        let target = format!("--target={}", self.keeper.id());
        ["nsenter", &target, "--net", "--mount", "--root", "--wd"].map(String::from)
    }

    fn ip(&self, arguments: &str) -> Result<(), String> {
        self.run("ip", arguments)
    }

    fn drop_all_from(&self, device: &str) -> Result<(), String> {
        let hook = format!("{{ type filter hook ingress device {device} priority 0; policy drop; }}");
        self.run("nft", &format!("add table netdev cut-{device}"))?;
        self.run("nft", &format!("add chain netdev cut-{device} incoming {hook}"))
    }

    fn drop_no_more(&self, device: &str) -> Result<(), String> {
        self.run("nft", &format!("delete table netdev cut-{device}"))
    }

    fn run(&self, program: &str, arguments: &str) -> Result<(), String> {
        let [enter, words @ ..] = self.starter();
        let output = Command::new(enter).args(words).arg(program).args(arguments.split(' ')).output();
        match output {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => {
                Err(format!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim()))
            }
            Err(error) => Err(format!("{program}: {error}")),
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

impl Network {
    /// So many hosts on a bridge. `None` without the right to make them, after a word that the test
    /// is skipped.
    pub fn of(hosts: u32) -> Option<Network> {
        Network::with(hosts, true)
    }

    /// As [`Network::of`], so many containers of this host, which have its /dev/shm in common.
    pub fn of_containers(containers: u32) -> Option<Network> {
        Network::with(containers, false)
    }

    fn with(hosts: u32, has_own_files: bool) -> Option<Network> {
        let made = Namespace::new(false).zip((0..hosts).map(|_| Namespace::new(has_own_files)).collect());
        let Some((switch, hosts)) = made else {
            println!("skipped: only root makes network namespaces, with unshare(1), nsenter(1) and ip(8)");
            return None;
        };
        let network = Network { switch, hosts };
        match network.connect() {
            Ok(()) => Some(network),
            Err(why) => {
                println!("skipped: hosts can't be connected here: {why}");
                None
            }
        }
    }

    fn connect(&self) -> Result<(), String> {
        self.switch.ip("link add name bridge type bridge")?;
        self.switch.ip("link set bridge up")?;
        for (number, host) in (0..).zip(&self.hosts) {
            self.switch.ip(&format!("link add name to{number} type veth peer name eth"))?;
            self.switch.ip(&format!("link set eth netns {}", host.keeper.id()))?;
            self.switch.ip(&format!("link set to{number} master bridge up"))?;
            host.ip(&format!("addr add {}/24 dev eth", Network::address(number)))?;
            host.ip("link set eth up")?;
        }
        Ok(())
    }

    /// The number of hosts.
    pub fn hosts(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// The address of a host.
    pub fn address(host: u32) -> String {
        format!("10.77.0.{}", host + 1)
    }

    /// The words that start a program on a host.
    pub fn starter(&self, host: u32) -> [String; 6] {
        self.hosts[host as usize].starter()
    }

    /// Drops every packet from a host and every packet to it. No connection is closed, and the host
    /// goes on.
    ///
    /// # Errors
    /// What the kernel or this machine lacks.
    pub fn cut(&self, host: u32) -> Result<(), String> {
        // Where packets come in: those of the host at the bridge, those to it on the host.
        self.switch.drop_all_from(&format!("to{host}"))?;
        self.hosts[host as usize].drop_all_from("eth")
    }

    /// Lets the packets of a host through again.
    pub fn heal(&self, host: u32) {
        self.switch.drop_no_more(&format!("to{host}")).expect("a table");
        self.hosts[host as usize].drop_no_more("eth").expect("a table");
    }

    /// Has a firewall on a host answer each TCP packet from another one with a reset.
    ///
    /// # Errors
    /// What the kernel or this machine lacks.
    pub fn refuse(&self, host: u32) -> Result<(), String> {
        let host = &self.hosts[host as usize];
        host.run("nft", "add table ip refuse")?;
        host.run("nft", "add chain ip refuse incoming { type filter hook input priority 0; }")?;
        host.run("nft", "add rule ip refuse incoming iifname eth meta l4proto tcp reject with tcp reset")
    }

    /// Takes that firewall away.
    pub fn accept(&self, host: u32) {
        self.hosts[host as usize].run("nft", "delete table ip refuse").expect("a table");
    }

    /// Limits what a host receives and sends.
    ///
    /// # Errors
    /// What the kernel lacks.
    pub fn slow_down(&self, host: u32, rate: &str) -> Result<(), String> {
        let shape = format!("root tbf rate {rate} burst 64kb latency 50ms");
        self.switch.run("tc", &format!("qdisc add dev to{host} {shape}"))?;
        self.hosts[host as usize].run("tc", &format!("qdisc add dev eth {shape}"))
    }

    /// Ends the limit of a host.
    pub fn speed_up(&self, host: u32) {
        self.switch.run("tc", &format!("qdisc del dev to{host} root")).expect("it is limited");
        self.hosts[host as usize].run("tc", "qdisc del dev eth root").expect("it is limited");
    }
}
