//! What to type on each host of a cluster of several.

use super::LaunchArgs;
use super::layout::HostSlots;
use std::fmt::Write;

/// The command of each host.
pub fn commands(args: &LaunchArgs, hosts: &HostSlots) -> String {
    let mut text = String::from(
        "Type on each host, in any order, within join_timeout (TENSORWIRE_JOIN_TIMEOUT, 60 s). All need\n\
         the same proof of who they are: a secret in a file (`tensorwire auth secret FILE`,\n\
         TENSORWIRE_SECRET_FILE) or certificates (`tensorwire auth certificates`).\n",
    );
    for (number, host) in hosts.names().enumerate() {
        // Writing to a String does not fail.
        let _ = writeln!(text, "\n{host}:\n  {}", command(args, number));
    }
    text
}

fn command(args: &LaunchArgs, number: usize) -> String {
    let mut words = vec!["tensorwire".to_owned(), "launch".into()];
    let mut option = |name: &str, value: &str| words.extend([name.to_owned(), quoted(value)]);
    match &args.jobs {
        Some(jobs) => option("--jobs", &jobs.to_string()),
        None if args.job != "worker" => option("--job", &args.job),
        None => {}
    }
    if let Some(hosts) = &args.hosts {
        option("--hosts", &hosts.to_string());
    }
    option("--host-rank", &number.to_string());
    if args.port != super::FIRST_PORT {
        option("--port", &args.port.to_string());
    }
    if let Some(cores) = &args.cores {
        option("--cores", &cores.to_string());
    }
    if args.grace != super::GRACE {
        option("--grace", &args.grace.to_string());
    }
    if args.paths {
        words.push("--paths".into());
    }
    words.push("--".into());
    words.extend(args.command.iter().map(|word| quoted(&word.to_string_lossy())));
    words.join(" ")
}

/// A word of a shell.
fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,@%+[]".contains(&byte);
    match !word.is_empty() && word.bytes().all(plain) && !word.contains('[') {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: LaunchArgs,
    }

    #[test]
    fn each_host_gets_the_command_that_starts_its_part() {
        let line = "launch --hosts a:1,[::1]:2 --jobs ps=1,worker=2 --cores 0-1 --paths --port 4000 --";
        let line = line.split(' ').chain(["./train", "--name", "it's a run"]);
        let args = Line::try_parse_from(line).unwrap().args;
        let text = commands(&args, args.hosts.as_ref().unwrap());
        let second = "[::1]:\n  tensorwire launch --jobs ps=1,worker=2 --hosts 'a:1,[::1]:2' --host-rank 1 \
                      --port \
                      4000 --cores 0,1 --paths -- ./train --name 'it'\\''s a run'\n";
        assert!(text.ends_with(second), "{text}");
        assert!(text.contains("a:\n  tensorwire launch ") && text.contains("auth secret"), "{text}");
    }
}
