//! What to type on each host of a cluster of several.

use super::LaunchArgs;
use super::environment::{BIND, CORES, PRINT_PATHS, is_of_members};
use super::layout::HostSlots;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use tensorwire::internals::config::setting_variables;

/// What the commands repeat of the launcher's environment: the settings. No setting holds a secret:
/// they name files.
#[derive(Default)]
pub struct RepeatedSettings {
    /// Words before the command.
    words: Vec<String>,
    /// Variables that are set and not repeated, with the reasons.
    left_out: Vec<String>,
}

impl RepeatedSettings {
    /// # Errors
    /// If a value is not UTF-8.
    pub fn of(
        args: &LaunchArgs,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, String> {
        let named = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value));
        let mut variables: BTreeMap<String, OsString> = variables.into_iter().filter_map(named).collect();
        let mut settings = RepeatedSettings::default();
        for name in setting_variables() {
            let Some(value) = variables.remove(&name) else { continue };
            let is_option = (name == CORES && args.cores.is_some()) || (name == PRINT_PATHS && args.paths);
            if name == BIND {
                settings.left_out.push(format!("{name}, an address of one host: set it there"));
            }
            if is_of_members(&name) || is_option {
                continue;
            }
            let value = value.into_string().map_err(|value| {
                format!(
                    "{name} is {value:?}, which is no UTF-8, so it can't be printed for other hosts: unset it"
                )
            })?;
            settings.words.push(format!("{name}={}", quoted(&value)));
        }
        // The value may be a secret.
        let is_unknown = |name: &&String| {
            let key = name.strip_prefix("TENSORWIRE_");
            key.is_some_and(|key| !key.starts_with("TEST_") && !key.starts_with("BUILD_"))
        };
        let unknown = variables.keys().filter(is_unknown).map(|name| format!("{name}, which is no setting"));
        settings.left_out.extend(unknown);
        Ok(settings)
    }
}

/// The command of each host.
pub fn commands(args: &LaunchArgs, hosts: &HostSlots, settings: &RepeatedSettings) -> String {
    let mut text = String::from(
        "Type on each host, in any order, within join_timeout (TENSORWIRE_JOIN_TIMEOUT, 60 s). All need\n\
         the same proof of who they are: a secret in a file (`tensorwire auth secret FILE`,\n\
         TENSORWIRE_SECRET_FILE) or certificates (`tensorwire auth certificates`).\n",
    );
    // Writing to a String does not fail.
    for left_out in &settings.left_out {
        let _ = writeln!(text, "Not in the commands: {left_out}.");
    }
    for (number, host) in hosts.names().enumerate() {
        let _ = writeln!(text, "\n{host}:\n  {}", command(args, number, settings));
    }
    text
}

fn command(args: &LaunchArgs, number: usize, settings: &RepeatedSettings) -> String {
    let mut words = settings.words.clone();
    words.extend(["tensorwire".to_owned(), "launch".into()]);
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
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,@%+".contains(&byte);
    // In zsh a word that begins with = is the path of a program.
    match !word.is_empty() && word.bytes().all(plain) && !word.starts_with('=') {
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
        let text = commands(&args, args.hosts.as_ref().unwrap(), &RepeatedSettings::default());
        let second = "[::1]:\n  tensorwire launch --jobs ps=1,worker=2 --hosts 'a:1,[::1]:2' --host-rank 1 \
                      --port \
                      4000 --cores 0,1 --paths -- ./train --name 'it'\\''s a run'\n";
        assert!(text.ends_with(second), "{text}");
        assert!(text.contains("a:\n  tensorwire launch ") && text.contains("auth secret"), "{text}");
    }

    fn settings(line: &str, variables: &[(&str, &str)]) -> RepeatedSettings {
        let args = Line::try_parse_from(line.split(' ')).unwrap().args;
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
        RepeatedSettings::of(&args, variables).unwrap()
    }

    #[test]
    fn settings_are_repeated_and_what_differs_from_member_to_member_is_not() {
        let variables = [
            ("RDMA_DEVICE", "mlx5_0"),
            ("TENSORWIRE_FABRIC", "tcp,shm"),
            ("TENSORWIRE_SECRET_FILE", "/my key's/$HOME"),
            ("TENSORWIRE_PROFILE", ""),
            ("TENSORWIRE_CORES", "3"),
            ("TENSORWIRE_PRINT_PATHS", "true"),
            ("TENSORWIRE_JOB", "w"),
            ("TENSORWIRE_TASK", "1"),
            ("TENSORWIRE_CLUSTER", "w=a:1"),
            ("TENSORWIRE_STORE", "file:///x"),
            ("TENSORWIRE_WORLD_SIZE", "2"),
            ("RANK", "1"),
            ("RDMA_OTHER", "1"),
            ("PATH", "/bin"),
        ];
        let mut all = settings("launch --hosts a:1 -- x", &variables);
        assert!(all.left_out.is_empty(), "{:?}", all.left_out);
        all.words.sort();
        let expected = [
            "RDMA_DEVICE=mlx5_0",
            "TENSORWIRE_CORES=3",
            "TENSORWIRE_FABRIC=tcp,shm",
            "TENSORWIRE_PRINT_PATHS=true",
            "TENSORWIRE_PROFILE=''",
            r"TENSORWIRE_SECRET_FILE='/my key'\''s/$HOME'",
        ];
        assert_eq!(all.words, expected);
        let given = settings("launch --hosts a:1 --cores 0 --paths -- x", &variables).words;
        assert!(
            given.len() == 4 && !given.iter().any(|word| word.contains("CORES") || word.contains("PATHS"))
        );
    }

    #[test]
    fn what_is_set_and_not_repeated_is_named_without_its_value() {
        let variables =
            [("TENSORWIRE_BIND", "10.0.0.1:1"), ("TENSORWIRE_SECRET", "hidden"), ("TENSORWIRE_TEST_X", "1")];
        let line = "launch --hosts a:1 -- x";
        let args = Line::try_parse_from(line.split(' ')).unwrap().args;
        let text = commands(&args, args.hosts.as_ref().unwrap(), &settings(line, &variables));
        let notes = "Not in the commands: TENSORWIRE_BIND, an address of one host: set it there.\n\
                     Not in the commands: TENSORWIRE_SECRET, which is no setting.\n\n";
        assert!(text.contains(notes), "{text}");
        assert!(!text.contains("hidden") && !text.contains("10.0.0.1") && !text.contains("TEST_X"), "{text}");
    }

    #[test]
    fn a_word_is_quoted_where_a_shell_would_read_more_into_it() {
        for plain in ["a=b", "tcp://h:1", "50%", "a_b-c.d", "1,2", "x@y+z"] {
            assert_eq!(quoted(plain), plain);
        }
        for word in
            ["", "a b", "$x", "`x`", "a;b", "~", "*", "a[1]", "{a,b}", "=ls", "!x", "#", "a\nb", "\u{e9}"]
        {
            assert_eq!(quoted(word), format!("'{word}'"));
        }
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
