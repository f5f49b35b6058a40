//! What the variables of launchers mean.

use super::tests::environment;
use super::*;
use std::ffi::OsString;

const MPI: [(&str, &str); 2] = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
const MASTER: [(&str, &str); 2] = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
const CLUSTER: (&str, &str) = ("TENSORWIRE_CLUSTER", "ps=127.0.0.1:1;worker=127.0.0.1:2");

fn variables(all: &[&[(&str, &str)]]) -> Vec<(OsString, OsString)> {
    environment(&all.concat())
}

fn built(all: &[&[(&str, &str)]]) -> Result<Config, ConfigError> {
    Config::builder().environment(variables(all)).build()
}

fn meeting(all: &[&[(&str, &str)]]) -> Result<Option<Meeting>, ConfigError> {
    Config::builder().environment(variables(all)).meeting()
}

fn met(all: &[&[(&str, &str)]]) -> Meeting {
    meeting(all).expect("it is allowed").expect("they meet")
}

fn refused(all: &[&[(&str, &str)]], parts: &[&str]) {
    let error = meeting(all).expect_err("it is refused").to_string();
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}

fn me(config: &Config) -> String {
    config.task_id().to_string()
}

#[test]
fn each_launcher_s_rank_and_size_are_understood() {
    let cases: [(&[(&str, &str)], _, _); 5] = [
        (&[("RANK", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")], (2, 4), (Some(0), None)),
        (&MPI, (1, 2), (None, None)),
        (&[("PMI_RANK", "0"), ("PMI_SIZE", "1")], (0, 1), (None, None)),
        (&[("SLURM_PROCID", "7"), ("SLURM_NTASKS", "8"), ("SLURM_LOCALID", "3")], (7, 8), (Some(3), None)),
        (
            &[("SLURM_PROCID", "1"), ("SLURM_NTASKS", "8"), ("SLURM_STEP_NUM_TASKS", "2")],
            (1, 2),
            (None, None),
        ),
    ];
    for (variables, place, local) in cases {
        let found = LaunchedRank::of(environment(variables)).unwrap().unwrap();
        assert_eq!(((found.rank, found.size), (found.local_rank, found.local_size)), (place, local));
        let met = met(&[variables, &MASTER]);
        assert_eq!((met.size, me(&met.config)), (place.1, format!("worker/{}", place.0)));
    }
    assert_eq!(LaunchedRank::of(environment(&[("RANK", "2")])).unwrap(), None);
    assert_eq!(LaunchedRank::of(environment(&[("RANK", ""), ("WORLD_SIZE", "")])).unwrap(), None);
}

#[test]
fn a_rank_is_a_member_of_a_cluster_that_is_named() {
    let config = built(&[&MPI, &[CLUSTER]]).unwrap();
    assert_eq!(me(&config), "worker/0", "the second member");
    assert_eq!(config.origin("task").to_string(), "environment variable OMPI_COMM_WORLD_RANK");
    let one_job = [("TENSORWIRE_CLUSTER", "w=127.0.0.1:1,127.0.0.1:2"), ("TENSORWIRE_JOB", "w")];
    assert_eq!(me(&built(&[&MPI, &one_job]).unwrap()), "w/1");
    let named = [("TENSORWIRE_JOB", "ps"), ("TENSORWIRE_TASK", "0")];
    assert_eq!(me(&built(&[&MPI, &[CLUSTER], &named]).unwrap()), "ps/0", "the settings win");
    let three = [("RANK", "0"), ("WORLD_SIZE", "3")];
    let error = built(&[&three, &[CLUSTER]]).unwrap_err().to_string();
    assert!(error.contains("it has 2 members, and the launcher that has set RANK has started 3"), "{error}");
}

#[test]
fn the_variables_of_this_crate_agree_with_those_of_the_launcher() {
    refused(&[&MPI, &MASTER, &[("TENSORWIRE_TASK", "0")]], &["task is \"0\"", "OMPI_COMM_WORLD_RANK says 1"]);
    refused(&[&MPI, &MASTER, &[("TENSORWIRE_WORLD_SIZE", "3")]], &["world_size is \"3\"", "says 2"]);
    let same = [("TENSORWIRE_TASK", "1"), ("TENSORWIRE_WORLD_SIZE", "2"), ("TENSORWIRE_JOB", "peer")];
    assert_eq!(me(&met(&[&MPI, &MASTER, &same]).config), "peer/1");
    let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")];
    assert_eq!(me(&met(&[&script, &MASTER, &same]).config), "peer/1", "a batch script starts members, too");
    let program = Config::builder().environment(variables(&[&MPI, &MASTER])).task(0);
    assert_eq!(me(&program.meeting().unwrap().unwrap().config), "worker/0", "the program wins");
}

#[test]
fn the_innermost_launcher_counts_and_two_that_start_the_same_processes_agree() {
    let torchrun = [("RANK", "5"), ("WORLD_SIZE", "8")];
    let inside = met(&[&MPI, &torchrun, &MASTER]);
    assert_eq!((inside.size, me(&inside.config)), (8, "worker/5".into()));
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")];
    assert_eq!(me(&met(&[&MPI, &slurm, &MASTER]).config), "worker/1", "a batch script has them too");
    let other = [("PMI_RANK", "0"), ("PMI_SIZE", "2")];
    refused(&[&MPI, &other, &MASTER], &["OMPI_COMM_WORLD_RANK is \"1\"", "PMI_RANK says 0", "unset"]);
}

#[test]
fn ranks_that_are_none_are_refused() {
    for (name, value) in [("RANK", "one"), ("RANK", "-1"), ("RANK", "+1"), ("WORLD_SIZE", "2.0")] {
        let both = [("RANK", "1"), ("WORLD_SIZE", "2")]
            .map(|(known, old)| if known == name { (known, value) } else { (known, old) });
        refused(&[&both, &MASTER], &[name, value, "a whole number"]);
    }
    refused(
        &[&[("RANK", "2"), ("WORLD_SIZE", "2")], &MASTER],
        &["RANK is \"2\"", "WORLD_SIZE is 2", "0 to 1"],
    );
    refused(&[&[("RANK", "0"), ("WORLD_SIZE", "4000")], &MASTER], &["world_size", "1 to 2048"]);
}

#[test]
fn members_that_do_not_know_who_or_how_many_they_are_are_told_what_to_set() {
    refused(
        &[&MASTER],
        &["task is not set", "MASTER_ADDR and MASTER_PORT says where", "RANK and WORLD_SIZE"],
    );
    let rank = [("TENSORWIRE_TASK", "0"), ("TENSORWIRE_STORE", "file:///tmp/s")];
    refused(&[&rank], &["world_size is not set", "store (environment variable TENSORWIRE_STORE)"]);
    refused(
        &[&MPI, &MASTER[..1]],
        &["MASTER_ADDR is \"10.0.0.1\"", "MASTER_PORT is not set", "TENSORWIRE_STORE"],
    );
    for port in ["0", "65536", "http"] {
        refused(&[&MPI, &[("MASTER_ADDR", "a"), ("MASTER_PORT", port)]], &["MASTER_PORT", port]);
    }
    assert!(meeting(&[&MPI]).unwrap().is_none());
    let error = built(&[&MPI]).unwrap_err().to_string();
    assert!(error.contains("cluster is not set") && error.contains("MASTER_ADDR and MASTER_PORT"), "{error}");
    assert!(meeting(&[&MPI, &[CLUSTER], &MASTER]).unwrap().is_none(), "there is a cluster");
}

#[test]
fn the_place_is_the_setting_or_the_master_and_beside_the_port_of_torchrun() {
    let store = |all: &[&[(&str, &str)]]| met(all).store.to_string();
    assert_eq!(store(&[&MPI, &MASTER]), "tcp://10.0.0.1:29500");
    let torchrun = [("TORCHELASTIC_RUN_ID", "job"), ("TORCHELASTIC_RESTART_COUNT", "1")];
    assert_eq!(store(&[&MPI, &MASTER, &torchrun]), "tcp://10.0.0.1:29501");
    assert_eq!(met(&[&MPI, &MASTER, &torchrun]).run, "job", "task 0 serves a new store");
    let last = [("MASTER_ADDR", "::1"), ("MASTER_PORT", "65535")];
    assert_eq!(store(&[&MPI, &last, &torchrun]), "tcp://[::1]:65534");
    let own = [("TENSORWIRE_STORE", "file:///shared/run-7")];
    assert_eq!(store(&[&MPI, &MASTER, &torchrun, &own]), "file:///shared/run-7");
    assert_eq!(met(&[&MPI, &MASTER, &torchrun, &own]).run, "job.1", "the file has keys of run 0");
    let slurm = [("SLURM_JOB_ID", "12"), ("SLURM_STEP_ID", "3")];
    assert_eq!(met(&[&MPI, &MASTER, &slurm]).run, "12.3");
    assert_eq!(met(&[&MPI, &MASTER]).run, "");
}
