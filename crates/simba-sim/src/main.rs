//! `simba-sim [--seeds N] [--from SEED]`: runs seeds on all cores; `SIMBA_SEED=n` replays one and prints it.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::cell::Cell;
use std::panic::catch_unwind;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use simba_sim::{Outcome, Plan, Scale, run};

/// Stops after this many broken seeds.
const MAX_BROKEN: usize = 5;

fn main() -> ExitCode {
    mark_panics();
    if let Ok(seed) = std::env::var("SIMBA_SEED") {
        return replay(&seed);
    }
    match arguments() {
        Ok((from, seeds)) => sweep(from, seeds),
        Err(message) => {
            eprintln!("{message}\nusage: simba-sim [--seeds N] [--from SEED], or SIMBA_SEED=n simba-sim");
            ExitCode::from(2)
        }
    }
}

fn arguments() -> Result<(u64, u64), String> {
    let (mut from, mut seeds) = (0, 1_000);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or(format!("`{name}` needs a number"))?;
        let value = value.parse().map_err(|_| format!("`{value}` is not a number"))?;
        match name.as_str() {
            "--seeds" => seeds = value,
            "--from" => from = value,
            _ => return Err(format!("`{name}` is unknown")),
        }
    }
    Ok((from, seeds))
}

fn replay(seed: &str) -> ExitCode {
    let Ok(seed) = seed.parse() else {
        eprintln!("SIMBA_SEED takes a number, not `{seed}`");
        return ExitCode::from(2);
    };
    let outcome = run(Plan::new(seed, Scale::default()));
    println!("{}", outcome.timeline());
    ExitCode::from(u8::from(!outcome.violations.is_empty() || PANICKED.get()))
}

fn sweep(from: u64, seeds: u64) -> ExitCode {
    let begin = Instant::now();
    let next = AtomicU64::new(from);
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let work = || worker(&next, from + seeds);
    let mut found = WorkerResult::default();
    let panicked_workers = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        let count = ended.iter().filter(|ended| ended.is_err()).count();
        ended.into_iter().flatten().for_each(|part| found.add(part));
        count
    });
    let WorkerResult { mut broken, panicked, tenures } = found;
    let ran = next.load(Ordering::Relaxed).min(from + seeds) - from;
    println!("{ran} seeds, {tenures} tenures, {:.1} s", begin.elapsed().as_secs_f64());
    broken.sort_by_key(|outcome: &Outcome| outcome.plan.seed);
    if let Some(first) = broken.first() {
        println!("{}", first.timeline());
    }
    for outcome in &broken {
        println!("SIMBA_SEED={} breaks: {}", outcome.plan.seed, outcome.violations[0]);
    }
    for seed in &panicked {
        println!("SIMBA_SEED={seed} panicked");
    }
    if panicked_workers > 0 {
        println!("{panicked_workers} of {workers} workers panicked; their results are lost");
    }
    ExitCode::from(u8::from(!broken.is_empty() || !panicked.is_empty() || panicked_workers > 0))
}

/// What one worker found in its seeds.
#[derive(Default)]
struct WorkerResult {
    broken: Vec<Outcome>,
    panicked: Vec<u64>,
    tenures: usize,
}

impl WorkerResult {
    fn add(&mut self, other: Self) {
        self.broken.extend(other.broken);
        self.panicked.extend(other.panicked);
        self.tenures += other.tenures;
    }
}

thread_local! {
    /// Whether any task on this thread panicked, including a task whose panic the runtime catches.
    static PANICKED: Cell<bool> = const { Cell::new(false) };
}

fn worker(next: &AtomicU64, end: u64) -> WorkerResult {
    let mut found = WorkerResult::default();
    loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= end || found.broken.len() + found.panicked.len() >= MAX_BROKEN {
            return found;
        }
        let outcome = catch_unwind(|| run(Plan::new(seed, Scale::default())));
        if PANICKED.replace(false) {
            found.panicked.push(seed);
        }
        if let Ok(outcome) = outcome {
            found.tenures += outcome.tenures;
            if !outcome.violations.is_empty() {
                found.broken.push(outcome);
            }
        }
    }
}

/// Marks the thread of every panic.
fn mark_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICKED.set(true);
        default(panic);
    }));
}
