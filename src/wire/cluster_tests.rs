use super::*;

fn hosts(list: &[&str]) -> Vec<HostPort> {
    list.iter().map(|text| text.parse().expect(text)).collect()
}

fn why(jobs: &[(&str, &[&str])]) -> String {
    let jobs = jobs.iter().map(|(job, list)| (job.to_string(), hosts(list)));
    Cluster::new(jobs).expect_err("refused").to_string()
}

#[test]
fn tasks_sort_by_job_and_then_by_number() {
    let task = |job, task| TaskId::new(job, task).unwrap();
    assert!(task("ps", 10) < task("worker", 0));
    assert!(task("worker", 2) < task("worker", 10));
    assert_eq!(task("worker", 10).to_string(), "worker/10");
}

#[test]
fn a_task_is_read_from_its_one_spelling() {
    let read = |text: &str| text.parse::<TaskId>().map_err(|error| error.to_string());
    assert_eq!(read("worker/10"), Ok(TaskId::new("worker", 10).unwrap()));
    assert_eq!(
        read("worker").unwrap_err(),
        "task \"worker\" has no '/': it must be JOB/NUMBER, such as worker/3"
    );
    for number in ["", "-1", "+1", "01", "4294967296", "1/2"] {
        assert!(read(&format!("worker/{number}")).unwrap_err().contains("has no number"), "{number}");
    }
    assert!(read("a b/1").unwrap_err().contains("has a job that is not"));
}

#[test]
fn one_rule_says_what_a_job_name_is() {
    for job in ["7up", "parameter-server_2", "W", &"x".repeat(64)] {
        assert!(TaskId::new(job, 0).is_ok(), "{job}");
        assert!(crate::wire::DeviceName { job, replica: 0, task: 0, kind: "CPU", number: 0 }.check().is_ok());
        let cluster: Cluster = format!("{job}=localhost:1").parse().expect(job);
        assert_eq!(cluster.jobs().collect::<Vec<_>>(), [job]);
    }
    for job in ["", "_a", "-a", "a/b", "w\u{f6}rker", "w;x", "a b", &"x".repeat(65)] {
        let error = TaskId::new(job, 0).unwrap_err().to_string();
        let rule =
            format!("job {job:?} must be 1 to 64 letters, digits, '_' and '-', a letter or digit first");
        assert_eq!(error, rule);
        assert!(
            crate::wire::DeviceName { job, replica: 0, task: 0, kind: "CPU", number: 0 }.check().is_err()
        );
        assert!(format!("{job}=localhost:1").parse::<Cluster>().is_err(), "{job}");
    }
}

#[test]
fn addresses_are_read_and_written_back() {
    for text in ["127.0.0.1:4000", "node-7.rack_2.example:1", "[::1]:65535"] {
        assert_eq!(text.parse::<HostPort>().expect(text).to_string(), text);
    }
    let v6: HostPort = "[::1]:9".parse().expect("v6");
    assert_eq!((v6.name(), v6.port(), v6.ip()), (None, 9, Some(Ipv6Addr::LOCALHOST.into())));
    let name: HostPort = "Example.COM:9".parse().expect("a name");
    assert_eq!(
        (name.name(), name.ip(), name.to_string()),
        (Some("example.com"), None, "example.com:9".into())
    );
    assert!(HostPort::try_from(SocketAddr::from(([127, 0, 0, 1], 0))).is_err(), "port 0");
}

#[test]
fn addresses_that_cannot_work_are_refused_with_the_reason() {
    for (address, reason) in [
        ("", "no port"),
        ("localhost", "no port"),
        ("localhost:", "not a number"),
        ("localhost:70000", "not a number"),
        ("localhost:+1", "not a number"),
        ("localhost:0", "port 0"),
        ("127.0.0.1:0", "port 0"),
        ("::1:80", "without brackets"),
        ("[::1:80", "without brackets"),
        ("[::g]:80", "brackets"),
        ("[ho]:80", "brackets"),
        (":80", "neither a name"),
        ("a b:80", "neither a name"),
        ("1.2.3:80", "neither a name"),
        ("http://x:80", "without brackets"),
        ("0.0.0.0:80", "unspecified"),
        ("[::]:80", "unspecified"),
    ] {
        let error = address.parse::<HostPort>().expect_err(address).to_string();
        assert!(
            error.contains(reason) && error.contains(&format!("address {address:?} ")),
            "{address}: {error}"
        );
    }
}

#[test]
fn a_cluster_shows_its_jobs_in_order_and_finds_addresses() {
    let text = " worker=LocalHost:7001, [::1]:7002;ps=127.0.0.1:7000";
    let cluster: Cluster = text.parse().unwrap();
    assert_eq!(cluster.to_string(), "ps=127.0.0.1:7000;worker=localhost:7001,[::1]:7002");
    let address = |job, task| cluster.address(&TaskId::new(job, task).unwrap()).map(HostPort::to_string);
    assert_eq!(address("worker", 1).as_deref(), Some("[::1]:7002"));
    assert_eq!((address("worker", 2), address("chief", 0)), (None, None));
    assert_eq!(cluster.members().count(), 3);
    assert_eq!((cluster.task_count("worker"), cluster.task_count("chief")), (Some(2), None));
}

#[test]
fn duplicates_and_empty_parts_are_refused() {
    assert!(why(&[]).contains("no job"));
    assert!(why(&[("ps", &[])]).contains("job ps has no task"));
    let same = "have the same address a:1: give each its own";
    assert_eq!(why(&[("ps", &["a:1", "A:1"])]), format!("ps/0 and ps/1 {same}"));
    assert_eq!(why(&[("w", &["b:1", "a:1"]), ("ps", &["a:1"])]), format!("ps/0 and w/1 {same}"));
    assert!(why(&[("ps", &["a:1"]), ("ps", &["a:2"])]).contains("job ps is listed twice"));
    let parsed = |text: &str| text.parse::<Cluster>().expect_err(text).to_string();
    assert_eq!(parsed("worker"), "\"worker\" must be JOB=HOST:PORT,HOST:PORT");
    assert!(parsed("worker=a:1,").starts_with("job worker: address \"\" has no port"));
    assert!(parsed("worker=a:1;").starts_with("\"\" must be JOB="));
}

#[test]
fn a_cluster_longer_than_a_hello_message_carries_is_refused() {
    let tasks = (1..=6_000).map(|port| format!("node-{port:05}:{port}")).collect::<Vec<_>>().join(",");
    let error = format!("worker={tasks}").parse::<Cluster>().expect_err("too long").to_string();
    assert!(error.contains("at most 65536 are allowed"), "{error}");
}

#[test]
fn clusters_that_differ_have_different_digests() {
    let [one, two]: [Cluster; 2] = ["ps=a:1", "ps=a:2"].map(|text| text.parse().unwrap());
    assert_ne!(one.digest(), two.digest());
    assert_eq!(one.digest(), one.clone().digest());
}
