//! Trials of many held mutexes.
//!
//! Every trial has a process of its own: memory that an earlier one freed would hide what this one takes.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use simba_core::{Lease, Simba};
use simba_measure::held::{Findings, Held, punctuality, sessions};
use simba_measure::{Effort, Row, Target, Unit};

use crate::args::TRIAL;
use crate::stores;

/// What a trial holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Sessions without the engine: the backend's share.
    Raw,
    /// Guards under the default lease, until they are all held.
    Settled,
    /// Guards under the default lease, through two rounds of renewals.
    Default,
    /// Guards under a short lease, through three rounds of renewals.
    Short,
}

impl Phase {
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

    /// How many rounds of renewals to watch.
    fn rounds(self) -> u32 {
        match self {
            Self::Raw | Self::Settled => 0,
            Self::Default => 2,
            Self::Short => 3,
        }
    }
}

/// One process full of held mutexes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trial {
    pub(crate) target: &'static str,
    pub(crate) phase: Phase,
    pub(crate) count: usize,
}

/// Memory, punctuality and processor time of many held mutexes.
pub(crate) async fn measure(target: &dyn Target, effort: Effort) -> Result<Vec<Row>> {
    let count = effort.pick(target.many() / 5, target.many());
    let trial = |phase| Trial { target: target.name(), phase, count }.in_a_process();
    let raw = trial(Phase::Raw).await?;
    let memory = trial(effort.pick(Phase::Settled, Phase::Default)).await?;
    let each = Row::new(target, format!("{count} held: memory each"), Unit::Bytes, memory.bytes);
    let mut rows = vec![each.floor(raw.bytes).goal("<= 2048 B")];
    let short = trial(Phase::Short).await?;
    let watched = [("default lease", &memory), ("3 s + 2 s lease", &short)];
    for (lease, seen) in watched.into_iter().filter(|(_, seen)| seen.cores > 0.0) {
        rows.extend(punctuality(target, count, lease, seen));
    }
    Ok(rows)
}

impl Trial {
    /// What to start the program with.
    pub(crate) fn words(self) -> [String; 4] {
        [TRIAL.to_owned(), self.target.to_owned(), self.phase.as_str().to_owned(), self.count.to_string()]
    }

    async fn in_a_process(self) -> Result<Findings> {
        let program = std::env::current_exe()?;
        let run =
            move || std::process::Command::new(program).args(self.words()).stderr(Stdio::inherit()).output();
        let output = tokio::task::spawn_blocking(run).await??;
        if !output.status.success() {
            bail!("the trial `{}` ended with {}", self.words().join(" "), output.status);
        }
        let said = serde_json::from_slice(&output.stdout).context("what a trial printed is no JSON")?;
        from_json(&said).context("a trial printed something else than its findings")
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

/// Does a trial in this process; its findings as JSON.
pub(crate) async fn try_out(trial: Trial) -> Result<Value> {
    let Trial { phase, count, .. } = trial;
    let target = stores::find(trial.target).context("no such target")?;
    let backend = target.connect().await?;
    if phase == Phase::Raw {
        let bytes = sessions(target, &*backend, count).await?;
        return Ok(to_json(Findings { bytes, ..Findings::default() }));
    }
    let simba = Simba::builder(backend).lease(phase.lease()?).build();
    let held = Held::take(target, &simba, count).await?;
    let findings = held.watch(phase.rounds()).await?;
    // The process ends here, and with it everything it holds: a release of each would take its time.
    held.abandon();
    Ok(to_json(findings))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_survive_the_way_between_two_processes() {
        let findings = Findings { bytes: 2048.5, cores: 0.25, late: 1.0, least_left: 2950.125, lost: 2.0 };
        let text = to_json(findings).to_string();
        assert_eq!(from_json(&serde_json::from_str(&text).unwrap()), Some(findings));
    }

    #[tokio::test]
    async fn held_mutexes_are_counted_as_held() {
        let trial = Trial { target: "memory", phase: Phase::Settled, count: 10 };
        let found = from_json(&try_out(trial).await.unwrap()).unwrap();
        assert_eq!((found.late, found.lost), (0.0, 0.0));
    }
}
