//! Trials of many held mutexes.
//!
//! Every trial runs in a new process: memory that an earlier trial freed would hide what this one needs.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use simba_core::{Lease, Simba};
use simba_measure::held::{Findings, Held, punctuality, sessions};
use simba_measure::{Effort, Row, Target, Unit};

use crate::args::TRIAL;
use crate::stores;

/// The kind of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrialKind {
    /// Sessions without the engine: the backend's part.
    Raw,
    /// Guards with the default lease, until all are held.
    Settled,
    /// Guards with the default lease, during two renewals of each.
    Default,
    /// Guards with a short lease, during three renewals of each.
    Short,
}

impl TrialKind {
    pub(crate) const ALL: [Self; 4] = [Self::Raw, Self::Settled, Self::Default, Self::Short];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Settled => "settled",
            Self::Default => "default",
            Self::Short => "short",
        }
    }

    fn lease(self) -> Result<Lease> {
        Ok(match self {
            Self::Raw | Self::Settled | Self::Default => Lease::default(),
            Self::Short => Lease::new(Duration::from_secs(3), Duration::from_secs(2))?,
        })
    }

    /// Returns how many renewals of each mutex to observe.
    fn rounds(self) -> u32 {
        match self {
            Self::Raw | Self::Settled => 0,
            Self::Default => 2,
            Self::Short => 3,
        }
    }
}

/// A process that holds many mutexes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trial {
    pub(crate) target: &'static str,
    pub(crate) kind: TrialKind,
    pub(crate) count: usize,
}

/// Measures memory, renewals and processor time of many held mutexes.
pub(crate) async fn measure(target: &dyn Target, effort: Effort) -> Result<Vec<Row>> {
    let count = effort.pick(target.many() / 5, target.many());
    let trial = |kind| Trial { target: target.name(), kind, count }.in_child_process();
    let raw = trial(TrialKind::Raw).await?;
    let memory = trial(effort.pick(TrialKind::Settled, TrialKind::Default)).await?;
    let each = Row::new(target, format!("{count} held: memory each"), Unit::Bytes, memory.bytes);
    let mut rows = vec![each.floor(raw.bytes).goal("<= 2048 B")];
    let short = trial(TrialKind::Short).await?;
    let trials = [("default lease", &memory), ("3 s + 2 s lease", &short)];
    for (lease, findings) in trials.into_iter().filter(|(_, findings)| findings.cores > 0.0) {
        rows.extend(punctuality(target, count, lease, findings));
    }
    Ok(rows)
}

impl Trial {
    /// Returns the arguments of the child process.
    pub(crate) fn args(self) -> [String; 4] {
        [TRIAL.to_owned(), self.target.to_owned(), self.kind.as_str().to_owned(), self.count.to_string()]
    }

    async fn in_child_process(self) -> Result<Findings> {
        let program = std::env::current_exe()?;
        let run =
            move || std::process::Command::new(program).args(self.args()).stderr(Stdio::inherit()).output();
        let output = tokio::task::spawn_blocking(run).await??;
        if !output.status.success() {
            bail!("the trial `{}` ended with {}", self.args().join(" "), output.status);
        }
        let findings = serde_json::from_slice(&output.stdout).context("a trial printed invalid JSON")?;
        from_json(&findings).context("a trial printed JSON without its findings")
    }
}

fn to_json(findings: Findings) -> Value {
    let Findings { bytes, cores, late, least_left, lost } = findings;
    json!({ "bytes": bytes, "cores": cores, "late": late, "least_left": least_left, "lost": lost })
}

fn from_json(json: &Value) -> Option<Findings> {
    let get = |name| json.get(name)?.as_f64();
    Some(Findings {
        bytes: get("bytes")?,
        cores: get("cores")?,
        late: get("late")?,
        least_left: get("least_left")?,
        lost: get("lost")?,
    })
}

/// Runs a trial in this process. Returns its findings as JSON.
pub(crate) async fn run(trial: Trial) -> Result<Value> {
    let Trial { kind, count, .. } = trial;
    let target = stores::find(trial.target).context("no such target")?;
    let backend = target.connect().await?;
    if kind == TrialKind::Raw {
        let bytes = sessions(target, &*backend, count).await?;
        return Ok(to_json(Findings { bytes, ..Findings::default() }));
    }
    let simba = Simba::builder(backend).with_lease(kind.lease()?).build();
    let held = Held::take(target, &simba, count).await?;
    let findings = held.watch(kind.rounds()).await?;
    // The process ends here, so the mutexes are not released.
    held.abandon();
    Ok(to_json(findings))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_the_same_after_a_round_trip_through_json() {
        let findings = Findings { bytes: 2048.5, cores: 0.25, late: 1.0, least_left: 2950.125, lost: 2.0 };
        let text = to_json(findings).to_string();
        assert_eq!(from_json(&serde_json::from_str(&text).unwrap()), Some(findings));
    }

    #[tokio::test]
    async fn held_mutexes_count_as_held() {
        let trial = Trial { target: "memory", kind: TrialKind::Settled, count: 10 };
        let found = from_json(&run(trial).await.unwrap()).unwrap();
        assert_eq!((found.late, found.lost), (0.0, 0.0));
    }
}
