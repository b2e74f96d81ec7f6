//! What a failing test prints, to distinguish an overloaded machine from a bug.

use std::fmt::Write as _;
use std::panic;
use std::sync::{Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// How often the watching thread wakes up.
const INTERVAL: Duration = Duration::from_millis(10);
/// Shorter delays of the watching thread are normal on a busy machine and not recorded.
const NOTABLE: Duration = Duration::from_millis(100);

/// A time in which a thread that only sleeps did not run.
struct Pause {
    at: Duration,
    length: Duration,
}

static PAUSES: Mutex<Vec<Pause>> = Mutex::new(Vec::new());

/// Makes every failing test of this process print the data to judge the failure: the engine's log with the time of
/// each acquisition, renewal, failed call and loss, the load of the machine, the processor time that its hypervisor gave
/// to others, and the times in which this process did not run.
///
/// The suite calls it for its own tests. Call it in other tests that depend on real time. Repeated calls do nothing; an
/// existing subscriber stays.
pub fn explain_failures() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let (began, stolen) = (Instant::now(), stolen_ticks());
        let log = fmt::layer().with_test_writer().with_ansi(false).with_timer(fmt::time::uptime());
        let ours = Targets::new().with_target("simba", LevelFilter::TRACE);
        // A test program may have its own subscriber.
        let _ = tracing_subscriber::registry().with(log.with_filter(ours)).try_init();
        let watch = thread::Builder::new().name("simba-tck-watch".into()).spawn(move || watch(began));
        let default = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            default(panic);
            print(began, stolen, watch.is_ok());
        }));
    });
}

/// Records when this thread wakes up late: then other threads of this process did not run either.
fn watch(began: Instant) {
    loop {
        let due = Instant::now() + INTERVAL;
        thread::sleep(INTERVAL);
        let length = due.elapsed();
        if length >= NOTABLE {
            let at = due.saturating_duration_since(began);
            PAUSES.lock().unwrap_or_else(PoisonError::into_inner).push(Pause { at, length });
        }
    }
}

/// Prints to stderr, which the test runner captures and shows for failing tests.
#[allow(clippy::print_stderr)]
fn print(began: Instant, stolen: Option<u64>, watched: bool) {
    let pauses = PAUSES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut report = format!("failed at {:.3} s; ", began.elapsed().as_secs_f64());
    match pauses.as_slice() {
        _ if !watched => report.push_str("pauses were not recorded"),
        [] => {
            let _ =
                write!(report, "this process was never paused for {NOTABLE:?}: not an overloaded machine");
        }
        _ => report.push_str("this process was paused"),
    }
    for Pause { at, length } in pauses.iter() {
        let _ = write!(report, ", at {:.3} s for {length:.0?}", at.as_secs_f64());
    }
    for (name, file) in [("load", "/proc/loadavg"), ("waiting for a processor", "/proc/pressure/cpu")] {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let _ = write!(report, "; {name}: {}", text.lines().next().unwrap_or("unknown"));
    }
    match (stolen, stolen_ticks()) {
        (Some(before), Some(now)) => {
            let _ = write!(report, "; stolen by the hypervisor: {} ms", now.saturating_sub(before) * 10);
        }
        _ => report.push_str("; stolen by the hypervisor: unknown"),
    }
    eprintln!("{report}");
}

/// Returns the processor time, in hundredths of a second, that the hypervisor has given to other machines.
fn stolen_ticks() -> Option<u64> {
    // cpu user nice system idle iowait irq softirq steal
    std::fs::read_to_string("/proc/stat").ok()?.split_whitespace().nth(8)?.parse().ok()
}
