//! Hosts on a bridge, each a network namespace. They end with their processes.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A bridge with hosts. The bridge is in a namespace of its own.
pub struct Network {
    switch: Namespace,
    hosts: Vec<Namespace>,
    /// What starts a program on its host.
    starter: Vec<&'static str>,
}

/// A network namespace, which lives as long as its keeper.
struct Namespace {
    keeper: Child,
}

impl Namespace {
    /// A namespace with a /dev/shm of its own, as a host has, or with the one of `sharer`.
    fn new(sharer: Option<&Namespace>) -> Option<Namespace> {
        let (starter, sleep) = match sharer {
            None => (Vec::new(), "mount -t tmpfs tmpfs /dev/shm && exec sleep 3600"),
            Some(sharer) => (sharer.enter(&["--mount", "--root", "--wd"]), "exec sleep 3600"),
        };
        let unshare = ["unshare", "--net", "--mount", "sh", "-c", sleep].map(String::from);
        let mut words = starter.into_iter().chain(unshare);
        let mut keeper = Command::new(words.next()?);
        keeper.args(words).stdin(Stdio::null()).stderr(Stdio::null());
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
    fn starter(&self) -> Vec<String> {
        self.enter(&["--net", "--mount", "--root", "--wd"])
    }

    /// The words that start a program with these of the namespaces and folders of this one.
    fn enter(&self, which: &[&str]) -> Vec<String> {
        let target = format!("--target={}", self.keeper.id());
        ["nsenter", &target].into_iter().chain(which.iter().copied()).map(String::from).collect()
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
        let words = self.starter();
        let mut command = Command::new(&words[0]);
        let output = command.args(&words[1..]).arg(program).args(arguments.split(' ')).output();
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
        Network::with((0..hosts).map(|_| Namespace::new(None)).collect(), &[])
    }

    /// As [`Network::of`], so many containers of one host, which have one /dev/shm. Each program is
    /// in a PID namespace of its own.
    pub fn of_containers(containers: u32) -> Option<Network> {
        let first = Namespace::new(None);
        let others = (1..containers).map(|_| Namespace::new(first.as_ref())).collect::<Option<Vec<_>>>();
        let all = first.zip(others).map(|(first, others)| std::iter::once(first).chain(others).collect());
        let starter = ["unshare", "--pid", "--fork", "--kill-child"];
        Network::with(all, &starter)
    }

    fn with(hosts: Option<Vec<Namespace>>, starter: &[&'static str]) -> Option<Network> {
        let made = Namespace::new(None).zip(hosts);
        let Some((switch, hosts)) = made else {
            println!("skipped: only root makes network namespaces, with unshare(1), nsenter(1) and ip(8)");
            return None;
        };
        let network = Network { switch, hosts, starter: starter.to_vec() };
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
    pub fn starter(&self, host: u32) -> Vec<String> {
        let inner = self.starter.iter().map(|word| (*word).to_owned());
        self.hosts[host as usize].starter().into_iter().chain(inner).collect()
    }

    /// The names in the /dev/shm of a host.
    pub fn files(&self, host: u32) -> String {
        let keeper = self.hosts[host as usize].keeper.id();
        let files = std::fs::read_dir(format!("/proc/{keeper}/root/dev/shm")).expect("its keeper lives");
        files.map(|file| file.expect("it is read").file_name().to_string_lossy().into_owned() + " ").collect()
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

    /// Limits what a host sends, except from and to the ports of the bootstrap service.
    ///
    /// # Errors
    /// What the kernel or this machine lacks.
    pub fn slow_down_links(&self, host: u32, rate: &str) -> Result<(), String> {
        let host = &self.hosts[host as usize];
        host.run("tc", "qdisc add dev eth root handle 1: htb default 2")?;
        host.run("tc", "class add dev eth parent 1: classid 1:1 htb rate 1gbit")?;
        host.run("tc", &format!("class add dev eth parent 1: classid 1:2 htb rate {rate}"))?;
        host.run("nft", "add table ip fast")?;
        host.run("nft", "add chain ip fast outgoing { type filter hook output priority 0; }")?;
        for side in ["sport", "dport"] {
            host.run(
                "nft",
                &format!("add rule ip fast outgoing tcp {side} 4000-4100 meta priority set 1:1"),
            )?;
        }
        Ok(())
    }

    /// Ends the limit of a host.
    pub fn speed_up(&self, host: u32) {
        self.switch.run("tc", &format!("qdisc del dev to{host} root")).expect("it is limited");
        self.hosts[host as usize].run("tc", "qdisc del dev eth root").expect("it is limited");
    }
}
