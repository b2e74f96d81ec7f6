//! `simba-sim [--seeds N] [--from SEED]`: runs seeds on all cores; `SIMBA_SEED=n` replays one and prints it.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use simba_sim::{Outcome, Plan, Scale, run};

/// After this many broken seeds the rest is not worth the time.
const ENOUGH: usize = 5;

fn main() -> ExitCode {
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
        let value = value.parse().map_err(|_| format!("`{value}` is no number"))?;
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
    ExitCode::from(u8::from(!outcome.violations.is_empty()))
}

fn sweep(from: u64, seeds: u64) -> ExitCode {
    let begin = Instant::now();
    let next = AtomicU64::new(from);
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let work = || worker(&next, from + seeds);
    let (mut broken, mut tenures) = (Vec::new(), 0);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        for (found, count) in workers.into_iter().filter_map(|worker| worker.join().ok()) {
            broken.extend(found);
            tenures += count;
        }
    });
    let ran = next.load(Ordering::Relaxed).min(from + seeds) - from;
    println!("{ran} seeds, {tenures} tenures, {:.1} s", begin.elapsed().as_secs_f64());
    broken.sort_by_key(|outcome: &Outcome| outcome.plan.seed);
    let Some(first) = broken.first() else { return ExitCode::SUCCESS };
    println!("{}", first.timeline());
    for outcome in &broken {
        println!("SIMBA_SEED={} breaks: {}", outcome.plan.seed, outcome.violations[0]);
    }
    ExitCode::FAILURE
}

fn worker(next: &AtomicU64, end: u64) -> (Vec<Outcome>, usize) {
    let (mut broken, mut tenures) = (Vec::new(), 0);
    loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= end || broken.len() >= ENOUGH {
            return (broken, tenures);
        }
        let outcome = run(Plan::new(seed, Scale::default()));
        tenures += outcome.tenures;
        if !outcome.violations.is_empty() {
            broken.push(outcome);
        }
    }
}
