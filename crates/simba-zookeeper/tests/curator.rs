//! Contenders of ours beside real ones of Curator's `LeaderLatch`, on one path.

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
use tokio::time::{Instant, sleep};

fn compile(dir: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/java/Contender.java");
    let compiled =
        Command::new("javac").args(["-cp", &curator_classpath(dir), "-d"]).arg(dir).arg(source).status();
    assert!(compiled.unwrap().success(), "the contender of the other kind does not compile");
}

/// A process of the other kind, killed when it is dropped.
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

/// One of ours, which does what the other kind does, until it is cut off from the store and forgotten.
async fn ours(mutex: MutexName, id: usize, ledger: Arc<File>) {
    for life in 0.. {
        let (backend, network) = Zookeeper::single().proxied().await;
        let simba = Simba::builder(Arc::new(backend)).lease(lease()).build();
        let dies = fastrand::u32(5..30);
        for tenure in 0..dies {
            let Ok(guard) = simba.locker(mutex.clone()).lock().await else { continue };
            let who = format!("rust r{id}.{life}.{tenure}");
            let end = Instant::now() + Duration::from_millis(fastrand::u64(30..130));
            let last = tenure + 1 == dies;
            if last {
                // As a process that is killed: the store hears no more of it.
                network.stall();
            }
            let long = Instant::now() + lease().total();
            while Instant::now() < if last { long } else { end } && write(&ledger, &who, &guard.tenure()) {
                sleep(Duration::from_millis(2)).await;
            }
            if last {
                std::mem::forget(guard);
                break;
            }
            let _ = guard.release().await;
        }
        // Kept until its session is over: healing would let it say goodbye.
        sleep(lease().total() * 2).await;
    }
}

fn write(mut ledger: &File, who: &str, tenure: &Tenure) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
    let line = format!("{who} {now}\n");
    tenure.is_held() && ledger.write_all(line.as_bytes()).is_ok()
}

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_56_curator_s_latches_and_ours_take_turns_and_never_lead_together() {
    let dir = tempfile::tempdir().unwrap();
    compile(dir.path());
    let mutex = MutexName::new(format!("mixed-{}", fastrand::u32(..))).unwrap();
    let url = shared("SIMBA_TCK_ZOOKEEPER");
    let servers = url.strip_prefix("zookeeper://").unwrap();
    let ledger = File::options().create(true).append(true).open(dir.path().join("ledger")).unwrap();
    let ledger = Arc::new(ledger);
    let mut field = Vec::new();
    let mut jvms = Vec::new();
    for id in 0..3 {
        jvms.push(Jvm::start(dir.path(), servers, &mutex, &format!("j{id}")));
        field.push(tokio::spawn(ours(mutex.clone(), id, Arc::clone(&ledger))));
    }
    let end = Instant::now() + MINUTE;
    for id in 3.. {
        sleep(Duration::from_secs(3)).await;
        if Instant::now() >= end {
            break;
        }
        let at = fastrand::usize(..jvms.len());
        jvms[at] = Jvm::start(dir.path(), servers, &mutex, &format!("j{id}"));
    }
    field.iter().for_each(tokio::task::JoinHandle::abort);
    drop(jvms);
    judge(&std::fs::read_to_string(dir.path().join("ledger")).unwrap());
}

/// A tenure is one block of lines. Whoever writes after another has begun led together with it.
fn judge(ledger: &str) {
    let (mut over, mut current) = (HashSet::new(), ("", "", 0));
    let mut led = [("jvm", 0), ("rust", 0)];
    let mut tenures = 0;
    for line in ledger.lines() {
        let parts: Vec<_> = line.split(' ').collect();
        let [side, who, at] = parts[..] else { panic!("broken: a line is torn: {line}") };
        let at: u64 = at.parse().unwrap();
        if who != current.1 {
            assert!(over.insert(current.1), "broken: {} led twice", current.1);
            assert!(!over.contains(who), "broken: {who} leads while {} does", current.1);
            (current, tenures) = ((side, who, at), tenures + 1);
        }
        if let Some((_, time)) = led.iter_mut().find(|(name, _)| *name == side) {
            *time += at.saturating_sub(current.2);
        }
        current.2 = at;
    }
    let total: u64 = led.iter().map(|(_, time)| time).sum();
    println!("{tenures} tenures, led for ms: {led:?}");
    for (side, time) in led {
        assert!(
            time * 5 >= total,
            "broken: each side leads a fifth of the time, but {side} {time} of {total} ms"
        );
    }
}

#[test]
fn the_judge_sees_two_who_lead_together() {
    let overlap = "jvm a 1\nrust b 2\njvm a 3\n";
    assert!(std::panic::catch_unwind(|| judge(overlap)).is_err());
    judge("jvm a 1\njvm a 3\nrust b 4\nrust b 6\n");
}
