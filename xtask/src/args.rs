//! The arguments of `cargo xtask`.

/// The help text.
pub(crate) const USAGE: &str = "\
The tasks of this workspace.

Usage: cargo xtask TASK

Tasks:
  test             run every check and every test, as CI does
  test --quick     run the checks for every commit, in a few minutes, without root, packages or servers
  full             run the tests that take too long for every change: a long simulation, 20 rounds of every fault,
                   the lowest versions of the dependencies, a rolling upgrade
  servers up       start the test servers and print their addresses as shell variables
  servers down     stop the test servers
  sim --seeds N    simulate N seeds; SIMBA_SEED=n cargo xtask sim replays one and prints it
  deny             check licences, bans and sources, with cargo-deny
  faults           run the tests of the fault matrix, each fault 20 times; --rounds N for another number
  upgrade          let this version and the previous one contend on every store, with kills
  bench [STORE…]   run the benchmarks of these stores [default: all]
  bench --quick    run shorter benchmarks

Examples:
  cargo xtask test --quick
  eval \"$(cargo xtask servers up)\"    start the servers, set their SIMBA_TCK_* variables
  cargo xtask servers down
";

/// One task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    Help,
    Test { quick: bool },
    Full,
    ServersUp,
    ServersDown,
    Sim { seeds: u64 },
    Deny,
    Faults { rounds: u32 },
    Upgrade,
    Bench { words: Vec<String> },
}

/// Parses the arguments. The error names the first unknown argument.
pub(crate) fn parse(words: &[&str]) -> Result<Task, String> {
    if words.iter().any(|word| matches!(*word, "-h" | "--help")) {
        return Ok(Task::Help);
    }
    match words {
        [] | ["help"] => Ok(Task::Help),
        ["test", rest @ ..] => quick("test", rest).map(|quick| Task::Test { quick }),
        ["full"] => Ok(Task::Full),
        ["bench", rest @ ..] => {
            Ok(Task::Bench { words: rest.iter().map(|word| (*word).to_owned()).collect() })
        }
        ["faults"] => Ok(Task::Faults { rounds: 20 }),
        ["faults", "--rounds", rounds] => match rounds.parse() {
            Ok(rounds) => Ok(Task::Faults { rounds }),
            Err(_) => Err(format!("`--rounds` takes a number, not `{rounds}`")),
        },
        ["faults", ..] => Err("`faults` takes only `--rounds N`".to_owned()),
        ["upgrade"] => Ok(Task::Upgrade),
        ["deny"] => Ok(Task::Deny),
        ["sim"] => Ok(Task::Sim { seeds: 1_000 }),
        ["sim", "--seeds", seeds] => match seeds.parse() {
            Ok(seeds) => Ok(Task::Sim { seeds }),
            Err(_) => Err(format!("`--seeds` takes a number, not `{seeds}`")),
        },
        ["sim", ..] => Err("`sim` takes only `--seeds N`".to_owned()),
        ["servers", "up"] => Ok(Task::ServersUp),
        ["servers", "down"] => Ok(Task::ServersDown),
        ["servers", ..] => Err("`servers` takes one word, `up` or `down`".to_owned()),
        [word, ..] => Err(format!("unknown task `{word}`")),
    }
}

fn quick(task: &str, rest: &[&str]) -> Result<bool, String> {
    match rest {
        [] => Ok(false),
        ["--quick"] => Ok(true),
        _ => Err(format!("`{task}` takes only `--quick`, not `{}`", rest.join(" "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_is_parsed() {
        assert_eq!(parse(&["test"]), Ok(Task::Test { quick: false }));
        assert_eq!(parse(&["test", "--quick"]), Ok(Task::Test { quick: true }));
        assert_eq!(parse(&["full"]), Ok(Task::Full));
        assert_eq!(parse(&["servers", "up"]), Ok(Task::ServersUp));
        assert_eq!(parse(&["servers", "down"]), Ok(Task::ServersDown));
        assert_eq!(parse(&["sim", "--seeds", "7"]), Ok(Task::Sim { seeds: 7 }));
        assert_eq!(parse(&["upgrade"]), Ok(Task::Upgrade));
        assert_eq!(parse(&["deny"]), Ok(Task::Deny));
        assert_eq!(parse(&["bench"]), Ok(Task::Bench { words: Vec::new() }));
        let words = vec!["--quick".to_owned(), "redis".to_owned()];
        assert_eq!(parse(&["bench", "--quick", "redis"]), Ok(Task::Bench { words }));
        assert_eq!(parse(&["faults"]), Ok(Task::Faults { rounds: 20 }));
        assert_eq!(parse(&["faults", "--rounds", "3"]), Ok(Task::Faults { rounds: 3 }));
    }

    #[test]
    fn help_is_printed_on_request_and_without_arguments() {
        for words in [&[][..], &["help"], &["-h"], &["--help"], &["servers", "--help"]] {
            assert_eq!(parse(words), Ok(Task::Help), "{words:?}");
        }
    }

    #[test]
    fn unknown_argument_is_named() {
        for words in [
            &["tset"][..],
            &["sim", "--seeds", "tset"],
            &["tset", "--quick"],
            &["test", "tset"],
            &["faults", "--rounds", "tset"],
        ] {
            assert!(parse(words).unwrap_err().contains("tset"), "{words:?}");
        }
    }

    #[test]
    fn error_of_servers_lists_its_arguments() {
        for words in [&["servers"][..], &["servers", "sideways"], &["servers", "up", "down"]] {
            assert!(parse(words).unwrap_err().contains("`up` or `down`"), "{words:?}");
        }
    }
}
