//! Times joins of processes of this host: from the end of `Node::start` to the end of `Node::join`.
//!
//! ```text
//! cargo bench --bench join             # 2 processes, 60 times, and 64 processes, 3 times
//! cargo bench --bench join -- 16 5     # 16 processes, 5 times
//! cargo bench --bench join -- 2 20 1GiB
//! ```
//!
//! The last argument is the size of the pools, 4 MiB without it. A join also waits for members that
//! still fill theirs: the last columns are of the member that was the last to start.

use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tensorwire::Node;

const CLUSTER: &str = "JOIN_CLUSTER";
const TASK: &str = "JOIN_TASK";
const POOL: &str = "JOIN_POOL";

fn main() -> Result<(), Box<dyn Error>> {
    if let (Ok(cluster), Ok(task)) = (std::env::var(CLUSTER), std::env::var(TASK)) {
        return member(&cluster, task.parse()?);
    }
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let runs = match arguments.as_slice() {
        [] => vec![(2, 60, "4MiB"), (64, 3, "4MiB")],
        [processes, rounds] => vec![(processes.parse()?, rounds.parse()?, "4MiB")],
        [processes, rounds, pool] => vec![(processes.parse()?, rounds.parse()?, pool.as_str())],
        _ => return Err("usage: cargo bench --bench join -- [PROCESSES ROUNDS [POOL_SIZE]]".into()),
    };
    println!("{:>9} {:>6} {:^26}   {:^26}", "", "", "all, ms", "last to start, ms");
    let head = format!("{:>8} {:>8} {:>8}", "median", "90 %", "largest");
    println!("{:>9} {:>6} {head}   {head}", "processes", "rounds");
    for (processes, rounds, pool) in runs {
        let (mut all, mut last) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let times = joined(processes, pool)?;
            // Nobody waits for a start after that of the last one.
            last.extend(times.iter().max_by_key(|it| it.started).map(|it| it.joined));
            all.extend(times.iter().map(|it| it.joined));
        }
        println!("{processes:>9} {rounds:>6} {}   {}", spread(&mut all), spread(&mut last));
    }
    Ok(())
}

fn spread(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let of = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)].as_secs_f64() * 1e3;
    format!("{:>8.1} {:>8.1} {:>8.1}", of(50), of(90), of(100))
}

/// Of one process.
struct Times {
    /// When `Node::start` was over, since the epoch.
    started: Duration,
    joined: Duration,
}

/// One process: joins, prints the nanoseconds, and serves its peers until its standard input ends.
fn member(cluster: &str, task: u32) -> Result<(), Box<dyn Error>> {
    let node = Node::builder()
        .without_environment()
        .member("worker", task)
        .set("cluster", cluster)
        .set("pool_size", std::env::var(POOL)?)
        .set("join_timeout", "120s")
        .start()?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let start = Instant::now();
    node.join()?;
    println!("{} {}", started.as_nanos(), start.elapsed().as_nanos());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    node.stop()?;
    Ok(())
}

/// The times of the processes of one join.
fn joined(processes: usize, pool: &str) -> Result<Vec<Times>, Box<dyn Error>> {
    // Held until all are found. The system gives connections and links of the first processes ports
    // of its own choice, which are above these.
    let held = (20_000..30_000).filter_map(|port| TcpListener::bind(("127.3.5.7", port)).ok());
    let held: Vec<_> = held.take(processes).collect();
    let addresses = held.iter().map(|socket| Ok(socket.local_addr()?.to_string()));
    let cluster = format!("worker={}", addresses.collect::<std::io::Result<Vec<_>>>()?.join(","));
    drop(held);
    let spawn = |task: usize| {
        let mut child = Command::new(std::env::current_exe()?);
        child.env(CLUSTER, &cluster).env(TASK, task.to_string()).env(POOL, pool);
        child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
    };
    let mut children = (0..processes).map(spawn).collect::<Result<Vec<Child>, _>>()?;
    let times = children.iter_mut().map(time_of).collect::<Result<Vec<_>, _>>()?;
    children.iter_mut().for_each(|child| drop(child.stdin.take()));
    for child in &mut children {
        child.wait()?;
    }
    Ok(times)
}

fn time_of(child: &mut Child) -> Result<Times, Box<dyn Error>> {
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no pipe")?).read_line(&mut line)?;
    let (started, joined) =
        line.trim().split_once(' ').ok_or("a process did not join; its error is above")?;
    Ok(Times {
        started: Duration::from_nanos(started.parse()?),
        joined: Duration::from_nanos(joined.parse()?),
    })
}
