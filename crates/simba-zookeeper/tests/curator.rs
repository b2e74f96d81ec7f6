//! Contenders of this crate together with contenders on Curator's `LeaderLatch`, on one path.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::collections::HashSet;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::{Zookeeper, lease};
use simba_core::{MutexName, Simba, Tenure};
use simba_servers::{curator_classpath, shared};
use simba_tck::Network;
use tokio::time::{Instant, sleep, timeout};

fn compile(dir: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/java/Contender.java");
    let compiled =
        Command::new("javac").args(["-cp", &curator_classpath(dir), "-d"]).arg(dir).arg(source).status();
    assert!(compiled.unwrap().success(), "the JVM contender does not compile");
}

/// A JVM contender, killed when it is dropped.
struct Jvm(Child);

impl Jvm {
    fn start(dir: &Path, servers: &str, mutex: &MutexName, id: &str) -> Self {
        let child = Command::new("java")
            .args([
                "-XX:TieredStopAtLevel=1",
                "-XX:+UseSerialGC",
                "-Xmx64m",
                "-cp",
                &curator_classpath(dir),
                "Contender",
            ])
            .args([servers, &format!("/simba/{mutex}"), id])
            .arg(dir.join("ledger"))
            .stderr(Stdio::inherit())
            .spawn();
        Self(child.unwrap())
    }
}

impl Drop for Jvm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a contender that does what a JVM contender does. It is repeatedly cut off from the store and replaced.
async fn run_contender(mutex: MutexName, id: usize, ledger: Arc<File>) {
    for process in 0.. {
        let (backend, network) = Zookeeper::single().proxied().await;
        let simba = Simba::builder(Arc::new(backend)).with_lease(lease()).build();
        let tenures = fastrand::u32(5..30);
        for tenure in 0..tenures {
            let Ok(guard) = simba.locker(mutex.clone()).lock().await else { continue };
            let label = format!("rust r{id}.{process}.{tenure}");
            let end = Instant::now() + Duration::from_millis(fastrand::u64(30..130));
            let last = tenure + 1 == tenures;
            if last {
                // As a killed process: the store receives nothing more from it.
                network.stall();
            }
            let long = Instant::now() + lease().total();
            while Instant::now() < if last { long } else { end } && write(&ledger, &label, &guard.tenure()) {
                sleep(Duration::from_millis(2)).await;
            }
            if last {
                std::mem::forget(guard);
                break;
            }
            let _ = guard.release().await;
        }
        // Kept until the session has ended: on a working network, dropping the client would close the session.
        sleep(lease().total() * 2).await;
    }
}

/// Writes a line if the tenure is held. The time is taken before the check: a contender that leads at the check has led
/// at that time, even if the line is written late.
fn write(mut ledger: &File, label: &str, tenure: &Tenure) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let line = format!("{label} {now}\n");
    tenure.is_held() && ledger.write_all(line.as_bytes()).is_ok()
}

const MINUTE: Duration = Duration::from_secs(60);
/// The least time between two kills of JVM contenders.
const BETWEEN_KILLS: Duration = Duration::from_secs(3);

/// Waits until a JVM contender has led. On a busy machine it takes seconds to start.
async fn has_led(ledger: &Path, id: usize) {
    let line = format!("jvm j{id}.");
    let led = async {
        while !std::fs::read_to_string(ledger).unwrap().contains(&line) {
            sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(MINUTE, led).await.unwrap_or_else(|_| panic!("broken: j{id} leads (not within {MINUTE:?})"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_56_contenders_on_curator_and_on_this_crate_exclude_each_other() {
    let dir = tempfile::tempdir().unwrap();
    compile(dir.path());
    let mutex = MutexName::new(format!("mixed-{}", fastrand::u32(..))).unwrap();
    let url = shared("SIMBA_TCK_ZOOKEEPER");
    let servers = url.strip_prefix("zookeeper://").unwrap();
    let path = dir.path().join("ledger");
    let ledger = Arc::new(File::options().create(true).append(true).open(&path).unwrap());
    let start = |id: usize| Jvm::start(dir.path(), servers, &mutex, &format!("j{id}"));
    let mut jvms: Vec<_> = (0..3).map(start).collect();
    for id in 0..3 {
        has_led(&path, id).await;
    }
    let run = |id| tokio::spawn(run_contender(mutex.clone(), id, Arc::clone(&ledger)));
    let contenders: Vec<_> = (0..3).map(run).collect();
    let end = Instant::now() + MINUTE;
    for id in 3.. {
        // Start one JVM at a time: on a busy machine the others would lead nearly alone otherwise.
        tokio::join!(sleep(BETWEEN_KILLS), has_led(&path, id - 1));
        if Instant::now() >= end {
            break;
        }
        let at = fastrand::usize(..jvms.len());
        jvms[at] = start(id);
    }
    contenders.iter().for_each(tokio::task::JoinHandle::abort);
    drop(jvms);
    check_ledger(&std::fs::read_to_string(path).unwrap());
}

/// Checks that no two contenders led at the same time. A tenure is one block of lines in the order of their times. A
/// line of a tenure after another one has begun shows an overlap.
fn check_ledger(ledger: &str) {
    let mut lines = Vec::new();
    for line in ledger.lines() {
        let parts: Vec<_> = line.split(' ').collect();
        let [side, tenure, at] = parts[..] else { panic!("broken: a line is incomplete: {line}") };
        lines.push((side, tenure, at.parse::<u64>().unwrap()));
    }
    lines.sort_by_key(|(_, _, at)| *at);
    let (mut over, mut current) = (HashSet::new(), ("", "", 0));
    let mut led = [("jvm", 0), ("rust", 0)];
    let mut tenures = 0;
    for (side, tenure, at) in lines {
        if tenure != current.1 {
            assert!(over.insert(current.1), "broken: {} led twice", current.1);
            assert!(!over.contains(tenure), "broken: {tenure} leads while {} does", current.1);
            (current, tenures) = ((side, tenure, at), tenures + 1);
        }
        if let Some((_, time)) = led.iter_mut().find(|(name, _)| *name == side) {
            *time += at.saturating_sub(current.2);
        }
        current.2 = at;
    }
    let total: u64 = led.iter().map(|(_, time)| time).sum();
    println!("{tenures} tenures, led for µs: {led:?}");
    for (side, time) in led {
        assert!(
            time * 5 >= total,
            "broken: each side leads a fifth of the time, but {side} {time} of {total} µs"
        );
    }
}

#[test]
fn check_ledger_detects_an_overlap() {
    let overlap = "jvm a 1\nrust b 2\njvm a 3\n";
    assert!(std::panic::catch_unwind(|| check_ledger(overlap)).is_err());
    check_ledger("jvm a 1\njvm a 3\nrust b 4\nrust b 6\n");
}

#[test]
fn check_ledger_orders_lines_by_their_times() {
    check_ledger("jvm a 1\nrust b 4\njvm a 3\nrust b 6\n");
}
