//! The arguments of `simba-bench`, including those that the program passes to its child processes.

use simba_measure::Effort;

use crate::held::{Trial, TrialKind};
use crate::stores;

/// The whole help text.
pub(crate) const USAGE: &str = "\
Measures the cost of Simba on each store, as ratios to the raw client of the same store.

Usage: simba-bench [--quick] [--json] [STORE…]

  STORE      a store to measure; all stores if none is given
  --quick    measure for a shorter time
  --json     one JSON object instead of a table
";

/// The internal flag that makes a child process run one trial of held mutexes.
pub(crate) const TRIAL: &str = "--trial";

/// A parsed command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Help,
    Measure { effort: Effort, json: bool, stores: Vec<&'static str> },
    Held(Trial),
}

/// Parses the arguments. The error names the unknown argument.
pub(crate) fn parse(args: &[&str]) -> Result<Command, String> {
    if let [TRIAL, rest @ ..] = args {
        return trial(rest).ok_or_else(|| format!("`{TRIAL}` is for internal use only"));
    }
    let (mut effort, mut json, mut stores) = (Effort::Full, false, Vec::new());
    for arg in args {
        match *arg {
            "-h" | "--help" => return Ok(Command::Help),
            "--quick" => effort = Effort::Quick,
            "--json" => json = true,
            name => match stores::find(name) {
                Some(store) => stores.push(store.name()),
                None => return Err(format!("unknown store `{name}`; the stores are {}", stores::names())),
            },
        }
    }
    Ok(Command::Measure { effort, json, stores })
}

fn trial(args: &[&str]) -> Option<Command> {
    let [target, kind, count] = args else { return None };
    let target = stores::find(target)?;
    let kind = TrialKind::ALL.into_iter().find(|one| one.as_str() == *kind)?;
    Some(Command::Held(Trial { target: target.name(), kind, count: count.parse().ok()? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_accepted_in_any_order() {
        let all = Command::Measure { effort: Effort::Full, json: false, stores: Vec::new() };
        assert_eq!(parse(&[]), Ok(all));
        let both = Ok(Command::Measure { effort: Effort::Quick, json: true, stores: vec!["memory"] });
        assert_eq!(parse(&["--quick", "memory", "--json"]), both);
        assert_eq!(parse(&["memory", "--json", "--quick"]), both);
        assert_eq!(parse(&["--json", "--help"]), Ok(Command::Help));
    }

    #[test]
    fn unknown_argument_is_named() {
        assert!(parse(&["--quick", "--qiuck"]).unwrap_err().contains("--qiuck"));
        assert!(parse(&[TRIAL, "memory"]).is_err());
    }

    #[test]
    fn arguments_of_a_trial_are_parsed() {
        for kind in TrialKind::ALL {
            let trial = Trial { target: "memory", kind, count: 7 };
            let args = trial.args();
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            assert_eq!(parse(&args), Ok(Command::Held(trial)));
        }
    }
}
