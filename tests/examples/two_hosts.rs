//! The ring on two hosts of two processes each, started as on real ones.

use crate::network::Network;
use crate::program::{example, tensorwire};
use crate::short::{lines, output};
use std::process::Command;
use tempfile::TempDir;

const HOSTS: u32 = 2;
const PER_HOST: u32 = 2;
const RANKS: u32 = HOSTS * PER_HOST;

/// A folder with a secret, and the setting that names it.
fn secret() -> (TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("secret").display().to_string();
    lines(Command::new(tensorwire()).args(["auth", "secret", &file]));
    (folder, format!("TENSORWIRE_SECRET_FILE={file}"))
}

/// Starts these words on these hosts, all at once. Returns what each has printed, on both streams.
fn run(network: &Network, commands: &[(u32, Vec<String>)]) -> Vec<(Vec<String>, Vec<String>)> {
    let start = |host: u32, words: &[String]| {
        let starter = network.starter(host);
        output(Command::new(&starter[0]).args(&starter[1..]).args(words))
    };
    std::thread::scope(|scope| {
        let started = commands.iter().map(|(host, words)| scope.spawn(|| start(*host, words)));
        let started: Vec<_> = started.collect();
        started.into_iter().map(|one| one.join().expect("it succeeds")).collect()
    })
}

fn sum_of(rank: u32) -> String {
    format!("rank {rank} of {RANKS}: the sum is {}", RANKS * (RANKS + 1) / 2)
}

#[test]
fn the_commands_that_the_launcher_prints_form_a_cluster_with_its_settings() {
    let Some(network) = Network::of(HOSTS) else { return };
    let (_folder, secret) = secret();
    let hosts = (0..HOSTS).map(|host| format!("{}:{PER_HOST}", Network::address(host))).collect::<Vec<_>>();
    let mut launch = Command::new("env");
    launch.args(["TENSORWIRE_FABRIC=tcp", &secret]).arg(tensorwire());
    launch.args(["launch", "--hosts", &hosts.join(","), "--paths", "--"]).arg(example("ring"));
    let said = lines(&mut launch);
    println!("{}", said.join("\n"));
    let folder = tensorwire().parent().expect("a folder").display().to_string();
    let path = format!("PATH={folder}:{}", std::env::var("PATH").expect("a path"));
    let on_host = |host: u32| {
        let begin = format!("{}:", Network::address(host));
        let at = said.iter().position(|line| *line == begin).expect("each host has a line");
        (host, ["env", &path, "sh", "-c", &said[at + 1]].map(str::to_owned).to_vec())
    };
    let commands: Vec<_> = (0..HOSTS).map(on_host).collect();
    for ((lines, told), host) in run(&network, &commands).into_iter().zip(0..) {
        println!("{lines:#?} {told:#?}");
        for rank in host * PER_HOST..(host + 1) * PER_HOST {
            assert!(lines.contains(&format!("[worker:{rank}] {}", sum_of(rank))), "{lines:?}");
        }
        // Members of one host would share memory without the setting.
        let over_tcp = told.iter().filter(|line| line.contains("connected by tcp")).count();
        assert_eq!((lines.len() as u32, over_tcp as u32), (PER_HOST, PER_HOST * (RANKS - 1)), "{told:?}");
    }
}

#[test]
fn ranks_of_two_hosts_meet_by_the_variables_of_torchrun_without_a_list_of_ports() {
    let Some(network) = Network::of(HOSTS) else { return };
    let (_folder, secret) = secret();
    let of_rank = |rank: u32| {
        let variables = [
            format!("RANK={rank}"),
            format!("WORLD_SIZE={RANKS}"),
            format!("LOCAL_RANK={}", rank % PER_HOST),
            format!("LOCAL_WORLD_SIZE={PER_HOST}"),
            format!("MASTER_ADDR={}", Network::address(0)),
            "MASTER_PORT=29500".into(),
            "TORCHELASTIC_RUN_ID=none".into(),
            "TENSORWIRE_FABRIC=shm,tcp".into(),
            "TENSORWIRE_PRINT_PATHS=true".into(),
            secret.clone(),
            example("ring").display().to_string(),
        ];
        (rank / PER_HOST, std::iter::once("env".to_owned()).chain(variables).collect())
    };
    let commands: Vec<_> = (0..RANKS).map(of_rank).collect();
    for ((lines, told), rank) in run(&network, &commands).into_iter().zip(0..) {
        println!("{lines:?} {told:#?}");
        assert_eq!(lines, [sum_of(rank)]);
        for peer in (0..RANKS).filter(|peer| *peer != rank) {
            let by = if peer / PER_HOST == rank / PER_HOST { "shm" } else { "tcp" };
            let is_of = |line: &&String| line.contains(&format!(": worker/{peer} "));
            let of: Vec<_> = told.iter().filter(is_of).collect();
            assert!(matches!(of[..], [line] if line.contains(&format!("connected by {by}"))), "{told:?}");
        }
    }
}
