//! What a process needs, and which lack is hard.

use super::*;

fn plan(processes: usize, more: &[(&str, &str)], limits: &SystemLimits) -> ResourcePlan {
    let cluster: Vec<String> = (1..=processes).map(|port| format!("127.0.0.1:{port}")).collect();
    let settings = Config::builder().without_environment().member("w", 0);
    let settings = settings.set("cluster", format!("w={}", cluster.join(",")));
    let settings = more.iter().fold(settings, |settings, (key, value)| settings.set(*key, *value));
    ResourcePlan::with(&settings.build().unwrap(), limits, &DeviceLimits::unknown("it is closed"))
}

const WIDE: SystemLimits = SystemLimits {
    open: 3,
    mapped: 0,
    running: 1,
    files: None,
    locked: None,
    user_threads: None,
    cgroup_threads: None,
    maps: None,
    ports: None,
    memory: None,
    address_space: None,
    file_size: None,
    cgroup_memory: None,
    has_device: false,
};

#[test]
fn a_plan_grows_with_the_peers() {
    let need = |processes, name: &str| {
        let plan = plan(processes, &[], &WIDE);
        plan.resources().iter().find(|it| it.name == name).unwrap().need
    };
    assert_eq!((need(1, "open files"), need(256, "open files")), (19, 19 + 5 * 255));
    assert!(need(256, "memory") > need(1, "memory"));
    let calls = plan(256, &[("fabric", "grpc")], &WIDE);
    let files = calls.resources().iter().find(|it| it.name == "open files").unwrap();
    assert_eq!(files.need, 19 + 4 * 255);
    let tcp = |more: &[(&str, &str)]| {
        let plan = plan(3, &[&[("fabric", "tcp")], more].concat(), &WIDE);
        plan.resources().iter().find(|it| it.name == "open files").unwrap().need
    };
    assert_eq!(tcp(&[("tcp_streams", "4")]), tcp(&[]) + 2 * 3);
    for (streams, arriving) in [("1", 128 + 2 * 8), ("4", 128 + 2 * 10)] {
        let settings = [("fabric", "tcp"), ("tcp_streams", streams)];
        let most = tcp(&settings[1..]) + 2 * FILES_PER_ATTEMPT + CANDIDATES + arriving;
        assert!(plan(3, &settings, &WIDE).to_string().contains(&format!("up to {most}")));
    }
    assert_eq!(tcp(&[("poll", "dedicated"), ("pollers", "3")]), tcp(&[]) + 2 * 2);
    assert_eq!(plan(1, &[], &WIDE).check().map_err(|error| error.to_string()), Ok(()));
}

#[test]
fn a_limit_that_is_too_low_is_named_with_need_and_remedy() {
    let few = SystemLimits { files: Some(1024), ..WIDE };
    assert!(plan(201, &[], &few).check().is_ok());
    let error = plan(256, &[], &few).check().unwrap_err().to_string();
    assert!(error.contains("255 peers") && error.contains("open files: 1294"), "{error}");
    assert!(error.contains("limit 1024 (RLIMIT_NOFILE): raise `ulimit -n` to 4355"), "{error}");
    let of = |fabric| plan(2, &[("fabric", fabric)], &SystemLimits { files: Some(1), ..WIDE });
    let remedy = |fabric| of(fabric).check().unwrap_err().to_string();
    assert!(remedy("shm").contains("to 155") && remedy("shm,tcp").contains("to 291"));
    let small = SystemLimits { locked: Some(64 << 10), ..WIDE };
    assert!(plan(2, &[], &small).check().is_ok(), "best effort");
    let error = plan(2, &[("pool_lock", "require")], &small).check().unwrap_err().to_string();
    assert!(
        error.contains("locked memory: 256 MiB (the pool), limit 64 KiB (RLIMIT_MEMLOCK): raise `ulimit -l`"),
        "{error}"
    );
    let ports = SystemLimits { ports: Some(28_232), ..WIDE };
    assert!(plan(256, &[], &ports).check().is_ok(), "shared memory needs none");
    assert!(plan(168, &[("fabric", "tcp")], &ports).check().is_ok());
    let error = plan(169, &[("fabric", "tcp")], &ports).check().unwrap_err().to_string();
    assert!(
        error.contains("ports: 28392 (169 members at this address, each with 168 links over tcp)"),
        "{error}"
    );
    // Each address has ports of its own, and a name can be that of several.
    let at = |addresses: &str, more: &[(&str, &str)]| {
        let cluster = [("cluster", addresses), ("fabric", "tcp")];
        plan(1, &[&cluster, more].concat(), &SystemLimits { ports: Some(3), ..WIDE })
    };
    assert!(at("w=127.0.0.1:1,127.0.0.2:1,127.0.0.2:2", &[]).check().is_ok());
    assert!(at("w=127.0.0.1:1,127.0.0.1:2,127.0.0.2:1", &[]).check().is_err());
    assert!(at("w=localhost:1,localhost:2,127.0.0.1:1", &[]).check().is_ok());
    assert!(at("w=127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", &[("bind", "127.0.0.9:1")]).check().is_ok());
    let maps = SystemLimits { maps: Some(100), ..WIDE };
    assert!(plan(16, &[], &maps).check().unwrap_err().to_string().contains("vm.max_map_count"));
}

#[test]
fn the_ports_are_counted_once_the_members_have_met() {
    let variables = [("RANK", "0"), ("WORLD_SIZE", "176"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
    let variables = variables.map(|(name, value)| (name.into(), value.into()));
    let meeting = Config::builder().environment(variables).set("fabric", "tcp").meeting();
    let config = meeting.expect("good settings").expect("nobody names the members").config;
    let has_ports = |plan: ResourcePlan| plan.resources().iter().any(|it| it.name == "ports");
    assert!(has_ports(ResourcePlan::new(&config)), "its members seem to be at one address");
    assert!(!has_ports(ResourcePlan::before_meeting(&config)));
}

#[test]
fn queue_pairs_are_those_for_messages_and_for_data() {
    let of = |more: &[(&str, &str)]| {
        let plan = plan(5, &[&[("fabric", "verbs")], more].concat(), &WIDE);
        plan.resources().iter().find(|it| it.name == "queue pairs").unwrap().need
    };
    assert_eq!((of(&[]), of(&[("rdma_qps_per_peer", "4")])), (8, 20));
    assert_eq!(of(&[("rdma_qps_per_peer", "4"), ("rdma_memory_windows", "on")]), 8);
}

#[test]
fn what_verbs_needs_is_counted_wherever_it_is_named() {
    let small = SystemLimits { locked: Some(64 << 10), ..WIDE };
    for fabric in ["verbs", "tcp,verbs", "shm,verbs"] {
        let plan = plan(5, &[("fabric", fabric)], &small);
        assert!(plan.resources().iter().any(|it| it.name == "queue pairs"), "{fabric}");
        assert!(plan.check().unwrap_err().to_string().contains("locked memory"), "{fabric}");
    }
    let without = plan(5, &[("fabric", "shm,tcp")], &small);
    assert!(without.resources().iter().all(|it| it.name != "queue pairs") && without.check().is_ok());
}

#[test]
fn a_device_that_is_found_counts_as_one_that_is_named_but_its_lack_is_not_hard() {
    let small = SystemLimits { locked: Some(64 << 10), has_device: true, ..WIDE };
    let of = |fabric: &[(&str, &str)], limits: &SystemLimits| {
        let hosts = [("cluster", "w=a:1,a:2,b:1"), ("auth", "plain"), ("allow_non_loopback", "true")];
        plan(3, &[&hosts, fabric].concat(), limits)
    };
    let need = |plan: &ResourcePlan, name: &str| {
        plan.resources().iter().find(|it| it.name == name).map(|it| it.need)
    };
    let (auto, named) = (of(&[], &small), of(&[("fabric", "shm,verbs,tcp")], &small));
    for name in ["locked memory", "open files", "queue pairs"] {
        assert!(need(&auto, name).is_some() && need(&auto, name) == need(&named, name), "{name}");
    }
    let without = of(&[], &SystemLimits { has_device: false, ..small });
    assert_eq!(need(&without, "open files"), need(&auto, "open files").map(|files| files - 3));
    assert_eq!((need(&without, "locked memory"), need(&without, "queue pairs")), (Some(256 << 20), None));
    assert!(auto.check().is_ok() && named.check().is_err());
}

#[test]
fn peers_on_the_same_host_need_no_queue_pairs_if_shared_memory_may_be_used() {
    let of = |fabric: &str| {
        let cluster = ("cluster", "w=a:1,a:2,b:1,c:1");
        let settings = [("fabric", fabric), cluster, ("auth", "plain"), ("allow_non_loopback", "true")];
        let plan = plan(4, &settings, &WIDE);
        let need = |name| plan.resources().iter().find(|it| it.name == name).unwrap().need;
        (need("queue pairs"), need("memory regions") - 1024)
    };
    assert_eq!((of("verbs"), of("tcp,verbs"), of("shm,verbs")), ((6, 7), (6, 7), (4, 5)));
}

#[test]
fn what_each_device_takes_is_counted_for_each() {
    let of = |device: &str, name: &str| {
        let settings = [("fabric", "verbs"), ("rdma_device", device), ("rdma_registrations", "10")];
        let plan = plan(5, &settings, &WIDE);
        plan.resources().iter().find(|it| it.name == name).unwrap().clone()
    };
    assert_eq!((of("a", "queue pairs").need, of("a,b", "queue pairs").need), (2 * 4, 3 * 4));
    let because = of("a,b", "queue pairs").because;
    assert!(because.contains("2 for data (one is a backup)") && because.contains("on each of 2 devices"));
    assert_eq!(of("a,b", "memory regions").need, 1 + 2 * 4 + 10);
    let locked = |device| of(device, "locked memory").need;
    // Of 4 peers: 256 bytes for each of 2 * 1024 places of a queue pair for data, and the
    // words, both in whole pages.
    let with = |queues: u64| (256 << 20) + 4 * (queues * (512 << 10) + 4096 + 3 * 4096);
    assert_eq!(locked("a"), with(1));
    assert_eq!((locked("a,b"), locked("auto")), (2 * with(2), 4 * with(2)));
    let enough = |device, limit| {
        let settings = [("fabric", "verbs"), ("rdma_device", device), ("rdma_registrations", "10")];
        plan(5, &settings, &SystemLimits { locked: Some(limit), ..WIDE }).check().is_ok()
    };
    assert!(enough("auto", with(1)) && !enough("auto", with(1) - 1), "there may be one device");
    assert!(enough("a,b", 2 * with(2)) && !enough("a,b", 2 * with(2) - 1));
    assert_eq!(of("a,b", "locked memory").because, "the pool by each of 2 devices, and 8 MiB for links");
    assert!(of("a", "memory").because.starts_with("pool_size, and 2 MiB of link memory"));
}

#[test]
fn the_memory_limit_of_the_cgroup_must_hold_what_the_start_fills() {
    let of = |limit: u64, more: &[(&str, &str)]| {
        let cgroup_memory = Some((limit, "memory.max of cgroup /cg/job".to_owned()));
        let limits = SystemLimits { cgroup_memory, ..WIDE };
        plan(5, &[&[("pool_size", "64MiB"), ("pool_pages", "plain")], more].concat(), &limits)
    };
    let error = of((64 << 20) - 1, &[]).check().unwrap_err().to_string();
    let says = ["memory of the cgroup: ", "limit 63 MiB (memory.max of cgroup /cg/job)", "lower pool_size"];
    assert!(says.iter().all(|part| error.contains(part)), "{error}");
    // The rings of links may stay empty. Those of verbs are registered.
    let narrow = of(64 << 20, &[]);
    let memory = narrow.resources().iter().find(|it| it.name == "memory of the cgroup").unwrap();
    assert!(memory.is_short() && narrow.check().is_ok(), "{memory}");
    assert!(of(64 << 20, &[("fabric", "verbs")]).check().is_err());
    let roomy = of(memory.need, &[]);
    assert!(roomy.resources().iter().all(|it| !it.is_short()), "{roomy}");
    // The hugetlb controller has the limit of reserved pages.
    let reserved = of(32 << 20, &[("pool_pages", "2m"), ("pool_require", "true")]);
    assert!(reserved.check().is_ok(), "{reserved}");
    let memory = |more: &[(&str, &str)]| {
        let limits = SystemLimits { memory: Some(32 << 20), ..WIDE };
        let plan = plan(1, &[&[("pool_size", "64MiB")], more].concat(), &limits);
        plan.resources().iter().find(|it| it.name == "memory").unwrap().is_short()
    };
    assert!(memory(&[("pool_pages", "plain")]));
    assert!(!memory(&[("pool_pages", "2m"), ("pool_require", "true")]), "they are reserved already");
    // A device that is only found may turn out not to be used.
    let hosts = [("cluster", "w=a:1,b:1"), ("auth", "plain"), ("allow_non_loopback", "true")];
    let found = |more: &[(&str, &str)]| {
        let cgroup_memory = Some((64 << 20, "memory.max of cgroup /cg/job".to_owned()));
        let limits = SystemLimits { cgroup_memory, has_device: true, ..WIDE };
        let pool = [("pool_size", "64MiB"), ("pool_pages", "plain")];
        plan(2, &[&hosts[..], &pool, more].concat(), &limits).check().is_ok()
    };
    assert!(found(&[]) && !found(&[("fabric", "shm,verbs,tcp")]));
    let files = |device, limit| {
        let settings = [("fabric", "verbs"), ("rdma_device", device), ("poll", "inline")];
        plan(2, &settings, &SystemLimits { files: Some(limit), ..WIDE }).check().is_ok()
    };
    let enough = (0..).find(|limit| files("a", *limit)).expect("some");
    assert!(files("auto", enough) && !files("auto", enough - 1), "there may be one device");
    assert!(!files("a,b", enough));
}

#[test]
fn the_address_space_must_hold_the_pool_beside_what_is_mapped() {
    let of = |limit| {
        let limits = SystemLimits { mapped: 1 << 20, address_space: Some(limit), ..WIDE };
        plan(2, &[("pool_size", "64MiB")], &limits)
    };
    let error = of((65 << 20) - 1).check().unwrap_err().to_string();
    let says = ["address space: ", "1 MiB are mapped", "limit 64 MiB (RLIMIT_AS): raise `ulimit -v`"];
    assert!(says.iter().all(|part| error.contains(part)), "{error}");
    assert!(of(65 << 20).check().is_ok());
}

#[test]
fn a_file_may_be_as_large_as_the_pool_and_as_the_memory_of_a_link() {
    let of = |processes, settings: &[(&str, &str)]| {
        plan(processes, settings, &SystemLimits { file_size: Some(4 << 20), ..WIDE })
    };
    let error = of(2, &[("pool_size", "8MiB")]).check().unwrap_err().to_string();
    assert!(error.contains("file size: 8 MiB") && error.contains("limit 4 MiB (RLIMIT_FSIZE)"), "{error}");
    assert!(error.contains("raise `ulimit -f`"), "{error}");
    assert!(of(2, &[("pool_size", "4MiB")]).check().is_ok());
    let deep = [("pool_size", "4MiB"), ("queue_depth", "65536")];
    assert!(of(2, &deep).check().unwrap_err().to_string().contains("file size"));
    let tcp = [&deep[..], &[("fabric", "tcp")]].concat();
    assert!(of(1, &deep).check().is_ok() && of(2, &tcp).check().is_ok(), "no link of shared memory");
}

#[test]
fn the_limits_of_threads_must_hold_those_of_the_start() {
    let of = |limits: &SystemLimits, more: &[(&str, &str)]| {
        let plan = plan(3, more, limits);
        let threads = plan.resources().iter().find(|it| it.name == "threads").unwrap().clone();
        (threads, plan.check().map_err(|error| error.to_string()))
    };
    let need = |more: &[(&str, &str)]| of(&SystemLimits { running: 5, ..WIDE }, more).0.need;
    // Bootstrap, callbacks, owners, a store, 2 attempts for each peer, and one of each fabric.
    assert_eq!(need(&[("fabric", "shm")]), 5 + 4 + 2 * 2 + 1 + 1);
    assert_eq!(need(&[("fabric", "shm,tcp"), ("poll", "inline")]), 5 + 4 + 2 * 2 + 2);
    assert_eq!(need(&[("fabric", "grpc")]), 5 + 4 + 2 * 2 + 1);
    let many = [("fabric", "tcp"), ("poll", "dedicated"), ("pollers", "6")];
    assert_eq!(need(&many), 5 + 4 + 2 * 2 + 1 + 6);

    let cgroup = |most| Some((most, "pids.max of cgroup /cg/job".to_owned()));
    let error = of(&SystemLimits { cgroup_threads: cgroup(8), ..WIDE }, &many).1.unwrap_err();
    assert!(error.contains("threads: 16 (1 run, 11, and while all join up to 2 per peer)"), "{error}");
    assert!(error.contains("limit 8 (pids.max of cgroup /cg/job): raise it (TasksMax"), "{error}");
    // Joins take fewer threads at a time.
    let (threads, checked) = of(&SystemLimits { cgroup_threads: cgroup(9), ..WIDE }, &many);
    assert!(threads.is_short() && checked.is_ok(), "{threads}");
    let error = of(&SystemLimits { user_threads: Some(8), ..WIDE }, &many).1.unwrap_err();
    assert!(error.contains("limit 8 (RLIMIT_NPROC): raise `ulimit -u`"), "{error}");
    // The smaller one is named.
    let both = |user, most| {
        of(&SystemLimits { user_threads: Some(user), cgroup_threads: cgroup(most), ..WIDE }, &many).0
    };
    assert_eq!((both(70, 60).limit, both(60, 70).limit), (Some(60), Some(60)));
    assert!(both(70, 60).origin.starts_with("pids.max") && both(60, 70).origin == "RLIMIT_NPROC");
}
