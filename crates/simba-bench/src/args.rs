//! What a person types after `simba-bench`, and what the program types itself.

use simba_measure::Effort;

use crate::held::{Phase, Trial};
use crate::stores;

/// The whole help text.
pub(crate) const USAGE: &str = "\
What Simba costs on top of a store, as ratios to the same store with nothing of ours in between.

Usage: simba-bench [--quick] [--json] [STORE…]

  STORE      one of those that are measured; all if none is named
  --quick    a short version
  --json     one JSON object instead of a table
";

/// The word before a trial of held mutexes, which the program gives to a process of its own.
pub(crate) const TRIAL: &str = "--trial";

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Help,
    Measure { effort: Effort, json: bool, stores: Vec<&'static str> },
    Held(Trial),
}

/// Understands the words, or says which of them it does not.
pub(crate) fn parse(words: &[&str]) -> Result<Command, String> {
    if let [TRIAL, rest @ ..] = words {
        return trial(rest).ok_or_else(|| format!("`{TRIAL}` is for the program itself"));
    }
    let (mut effort, mut json, mut stores) = (Effort::Full, false, Vec::new());
    for word in words {
        match *word {
            "-h" | "--help" => return Ok(Command::Help),
            "--quick" => effort = Effort::Quick,
            "--json" => json = true,
            name => match stores::find(name) {
                Some(store) => stores.push(store.name()),
                None => return Err(format!("there is no `{name}`; the stores are {}", stores::names())),
            },
        }
    }
    Ok(Command::Measure { effort, json, stores })
}

fn trial(words: &[&str]) -> Option<Command> {
    let [target, phase, count] = words else { return None };
    let target = stores::find(target)?;
    let phase = Phase::ALL.into_iter().find(|one| one.as_str() == *phase)?;
    Some(Command::Held(Trial { target: target.name(), phase, count: count.parse().ok()? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_come_in_any_order() {
        let all = Command::Measure { effort: Effort::Full, json: false, stores: Vec::new() };
        assert_eq!(parse(&[]), Ok(all));
        let both = Ok(Command::Measure { effort: Effort::Quick, json: true, stores: vec!["memory"] });
        assert_eq!(parse(&["--quick", "memory", "--json"]), both);
        assert_eq!(parse(&["memory", "--json", "--quick"]), both);
        assert_eq!(parse(&["--json", "--help"]), Ok(Command::Help));
    }

    #[test]
    fn an_unknown_word_is_named() {
        assert!(parse(&["--quick", "--qiuck"]).unwrap_err().contains("--qiuck"));
        assert!(parse(&[TRIAL, "memory"]).is_err());
    }

    #[test]
    fn a_trial_finds_its_way_back() {
        for phase in Phase::ALL {
            let trial = Trial { target: "memory", phase, count: 7 };
            let words = trial.words();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            assert_eq!(parse(&words), Ok(Command::Held(trial)));
        }
    }
}
