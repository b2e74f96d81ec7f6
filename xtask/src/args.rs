//! What a person types after `cargo xtask`.

/// The whole help text.
pub(crate) const USAGE: &str = "\
The chores of this workspace.

Usage: cargo xtask CHORE

Chores:
  test             run every check and every test, as CI does
  test --quick     run what belongs before every commit, in a few minutes, without root, packages or servers
  full             run what takes too long for every change: long simulation, 20 rounds of every fault, both ends of
                   the ranges of dependencies, a rolling upgrade
  servers up       start the test servers and print where they are
  servers down     stop them
  sim --seeds N    simulate N seeds; SIMBA_SEED=n cargo xtask sim replays one and prints it
  deny             check licences, bans and sources, with cargo-deny
  faults           run the tests of the fault matrix, each fault 20 times; --rounds N for another number
  upgrade          let this version and the one before contend on every store, with kills
  bench [STORE…]   run the benchmarks, of these stores alone if any are named
  bench --quick    run a short version of them

Examples:
  cargo xtask test --quick
  eval \"$(cargo xtask servers up)\"    start the servers, set their SIMBA_TCK_* variables
  cargo xtask servers down
";

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Chore {
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

/// Understands the words, or says which of them it does not.
pub(crate) fn parse(words: &[&str]) -> Result<Chore, String> {
    if words.iter().any(|word| matches!(*word, "-h" | "--help")) {
        return Ok(Chore::Help);
    }
    match words {
        [] | ["help"] => Ok(Chore::Help),
        ["test", rest @ ..] => quick("test", rest).map(|quick| Chore::Test { quick }),
        ["full"] => Ok(Chore::Full),
        ["bench", rest @ ..] => {
            Ok(Chore::Bench { words: rest.iter().map(|word| (*word).to_owned()).collect() })
        }
        ["faults"] => Ok(Chore::Faults { rounds: 20 }),
        ["faults", "--rounds", rounds] => match rounds.parse() {
            Ok(rounds) => Ok(Chore::Faults { rounds }),
            Err(_) => Err(format!("`--rounds` takes a number, not `{rounds}`")),
        },
        ["faults", ..] => Err("`faults` takes nothing but `--rounds N`".to_owned()),
        ["upgrade"] => Ok(Chore::Upgrade),
        ["deny"] => Ok(Chore::Deny),
        ["sim"] => Ok(Chore::Sim { seeds: 1_000 }),
        ["sim", "--seeds", seeds] => match seeds.parse() {
            Ok(seeds) => Ok(Chore::Sim { seeds }),
            Err(_) => Err(format!("`--seeds` takes a number, not `{seeds}`")),
        },
        ["sim", ..] => Err("`sim` takes nothing but `--seeds N`".to_owned()),
        ["servers", "up"] => Ok(Chore::ServersUp),
        ["servers", "down"] => Ok(Chore::ServersDown),
        ["servers", ..] => Err("`servers` takes one word, `up` or `down`".to_owned()),
        [word, ..] => Err(format!("there is no chore `{word}`")),
    }
}

fn quick(chore: &str, rest: &[&str]) -> Result<bool, String> {
    match rest {
        [] => Ok(false),
        ["--quick"] => Ok(true),
        _ => Err(format!("`{chore}` takes nothing but `--quick`, not `{}`", rest.join(" "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chore_is_understood() {
        assert_eq!(parse(&["test"]), Ok(Chore::Test { quick: false }));
        assert_eq!(parse(&["test", "--quick"]), Ok(Chore::Test { quick: true }));
        assert_eq!(parse(&["full"]), Ok(Chore::Full));
        assert_eq!(parse(&["servers", "up"]), Ok(Chore::ServersUp));
        assert_eq!(parse(&["servers", "down"]), Ok(Chore::ServersDown));
        assert_eq!(parse(&["sim", "--seeds", "7"]), Ok(Chore::Sim { seeds: 7 }));
        assert_eq!(parse(&["upgrade"]), Ok(Chore::Upgrade));
        assert_eq!(parse(&["deny"]), Ok(Chore::Deny));
        assert_eq!(parse(&["bench"]), Ok(Chore::Bench { words: Vec::new() }));
        let words = vec!["--quick".to_owned(), "redis".to_owned()];
        assert_eq!(parse(&["bench", "--quick", "redis"]), Ok(Chore::Bench { words }));
        assert_eq!(parse(&["faults"]), Ok(Chore::Faults { rounds: 20 }));
        assert_eq!(parse(&["faults", "--rounds", "3"]), Ok(Chore::Faults { rounds: 3 }));
    }

    #[test]
    fn help_is_given_when_asked_for_and_when_nothing_is_said() {
        for words in [&[][..], &["help"], &["-h"], &["--help"], &["servers", "--help"]] {
            assert_eq!(parse(words), Ok(Chore::Help), "{words:?}");
        }
    }

    #[test]
    fn an_unknown_word_is_named() {
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
    fn servers_says_which_words_it_takes() {
        for words in [&["servers"][..], &["servers", "sideways"], &["servers", "up", "down"]] {
            assert!(parse(words).unwrap_err().contains("`up` or `down`"), "{words:?}");
        }
    }
}
