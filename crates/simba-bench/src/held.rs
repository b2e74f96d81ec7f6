//! Many mutexes held at once: what each costs in memory, and whether all are renewed on time.
//!
//! Every trial has a process of its own: memory that an earlier one freed would hide what this one takes.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use simba_core::{
    Answer, Backend, Claim, Clock, ContenderId, Guard, Lease, MutexName, Prior, Session, Simba, SystemClock,
};

use crate::Effort;
use crate::args::TRIAL;
use crate::process::{processor_time, resident, thread_time};
use crate::report::{Row, Unit};
use crate::stores;
use crate::target::Target;

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
    let row = |name: &str, unit, value| Row::new(target, format!("{count} held: {name}"), unit, value);
    let mut rows = vec![row("memory each", Unit::Bytes, memory.bytes).floor(raw.bytes).goal("<= 2048 B")];
    let short = trial(Phase::Short).await?;
    let watched = [("default lease", &memory), ("3 s + 2 s lease", &short)];
    for (lease, seen) in watched.into_iter().filter(|(_, seen)| seen.cores > 0.0) {
        rows.push(row(&format!("processor, {lease}"), Unit::Cores, seen.cores).goal("<= 0.25 cores"));
        rows.push(row(&format!("late renewals, {lease}"), Unit::Count, seen.late).goal("0"));
        rows.push(row(&format!("least time left, {lease}"), Unit::Millis, seen.least_left));
        rows.push(row(&format!("losses, {lease}"), Unit::Count, seen.lost).goal("0"));
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
        Findings::from_json(&said).context("a trial printed something else than its findings")
    }
}

/// What a trial found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Findings {
    /// Resident memory for each mutex.
    bytes: f64,
    /// Processor time in cores, without the benchmark's own thread; zero if no renewals were watched.
    cores: f64,
    /// Mutexes whose holder was seen to have no more than the grace left.
    late: f64,
    /// The least time to a deadline that was seen, in milliseconds.
    least_left: f64,
    lost: f64,
}

impl Findings {
    fn to_json(self) -> Value {
        let Self { bytes, cores, late, least_left, lost } = self;
        json!({ "bytes": bytes, "cores": cores, "late": late, "least_left": least_left, "lost": lost })
    }

    fn from_json(json: &Value) -> Option<Self> {
        let get = |name| json.get(name)?.as_f64();
        Some(Self {
            bytes: get("bytes")?,
            cores: get("cores")?,
            late: get("late")?,
            least_left: get("least_left")?,
            lost: get("lost")?,
        })
    }
}

/// Does a trial in this process; its findings as JSON.
pub(crate) async fn try_out(trial: Trial) -> Result<Value> {
    let target = stores::find(trial.target).context("no such target")?;
    let backend = target.connect().await?;
    let findings = match trial.phase {
        Phase::Raw => raw(&*backend, trial.count).await?,
        Phase::Settled | Phase::Default | Phase::Short => {
            let simba = Simba::builder(backend).lease(trial.phase.lease()?).build();
            guards(&simba, trial).await?
        }
    };
    Ok(findings.to_json())
}

/// A name that no other process holds: what an earlier trial left behind ends by its lease alone.
fn name(n: usize) -> Result<MutexName> {
    Ok(MutexName::new(format!("bench:held:{}:{n:06}", std::process::id()))?)
}

async fn raw(backend: &dyn Backend, count: usize) -> Result<Findings> {
    let mut sessions: Vec<Box<dyn Session>> = Vec::with_capacity(count);
    let before = resident()?;
    for n in 0..count {
        let claim = Claim::new(name(n)?, ContenderId::generate(), Lease::default());
        let mut session = backend.open(claim).await?;
        if !matches!(session.contend(Prior::Nothing).await?, Answer::Ours(_)) {
            bail!("an uncontended mutex was refused");
        }
        sessions.push(session);
    }
    Ok(Findings { bytes: each(before, count)?, ..Findings::default() })
}

async fn guards(simba: &Simba, trial: Trial) -> Result<Findings> {
    let Trial { phase, count, .. } = trial;
    // What the process needs once is there before the count starts.
    simba.locker("bench:first").lock().await?.release().await?;
    let mut guards = Vec::with_capacity(count);
    let before = resident()?;
    for n in 0..count {
        guards.push(simba.locker(name(n)?).lock().await?);
    }
    let settle = Duration::from_millis(500);
    SystemClock.sleep_until(SystemClock.now() + settle).await;
    let mut findings = watch(&guards, phase).await?;
    findings.bytes = each(before, count)?;
    // The process ends here, and with it everything it holds: a release of each would take its time.
    guards.into_iter().for_each(std::mem::forget);
    Ok(findings)
}

fn each(before: usize, count: usize) -> Result<f64> {
    Ok(resident()?.saturating_sub(before) as f64 / count as f64)
}

/// Looks at all guards again and again while they are renewed.
async fn watch(guards: &[Guard], phase: Phase) -> Result<Findings> {
    let lease = phase.lease()?;
    let clock = SystemClock;
    let length = lease.renew_at() * phase.rounds();
    // Often enough that nobody is late between two looks for long, seldom enough to disturb little.
    let pause = lease.grace() / 4;
    let (start, end) = (clock.now(), clock.now() + length);
    let (processor, own) = (processor_time()?, thread_time()?);
    let mut late = vec![false; guards.len()];
    let mut least_left = lease.total();
    while clock.now() < end {
        clock.sleep_until((clock.now() + pause).min(end)).await;
        for (guard, late) in guards.iter().zip(&mut late) {
            let left = guard.remaining();
            least_left = least_left.min(left);
            *late |= left <= lease.grace();
        }
    }
    let worked = (processor_time()? - processor).saturating_sub(thread_time()? - own);
    let cores =
        if length.is_zero() { 0.0 } else { worked.as_secs_f64() / (clock.now() - start).as_secs_f64() };
    let count = |many: usize| many as f64;
    Ok(Findings {
        bytes: 0.0,
        cores,
        late: count(late.iter().filter(|late| **late).count()),
        least_left: least_left.as_secs_f64() * 1e3,
        lost: count(guards.iter().filter(|guard| !guard.is_held()).count()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_survive_the_way_between_two_processes() {
        let findings = Findings { bytes: 2048.5, cores: 0.25, late: 1.0, least_left: 2950.125, lost: 2.0 };
        let text = findings.to_json().to_string();
        assert_eq!(Findings::from_json(&serde_json::from_str(&text).unwrap()), Some(findings));
    }

    #[tokio::test]
    async fn held_mutexes_are_counted_as_held() {
        let trial = Trial { target: "memory", phase: Phase::Settled, count: 10 };
        let found = Findings::from_json(&try_out(trial).await.unwrap()).unwrap();
        assert_eq!((found.late, found.lost), (0.0, 0.0));
    }
}
