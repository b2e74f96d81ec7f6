//! Beside etcd's own lock: `etcdctl lock` on the same prefix, which keeps the order of Go's `concurrency.Mutex`.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::process::{Child, Stdio};
use std::time::Duration;

use common::etcdctl;
use common::peer::{Peer, leads, long, name, soon};
use simba_core::MutexName;
use simba_servers::shared;
use tokio::time::sleep;

/// A lock of `etcdctl` that a command runs under.
struct Lock {
    process: Child,
    /// The command ends when there is a file of this name, and with it the lock.
    end: tempfile::TempDir,
}

impl Lock {
    /// Waits for its turn by itself.
    fn begin(mutex: &MutexName) -> Self {
        let end = tempfile::tempdir().unwrap();
        let script = "echo $ETCD_LOCK_KEY; while [ ! -e \"$0\" ]; do sleep 0.02; done";
        let file = end.path().join("end").display().to_string();
        let mut command = etcdctl(&shared("SIMBA_TCK_ETCD"));
        command.args(["lock", &format!("simba/{mutex}"), "--", "sh", "-c", script, &file]);
        Self { process: command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap(), end }
    }

    /// Completes once it has the lock, and says by which key.
    async fn held(&mut self) -> String {
        let out = self.process.stdout.take().unwrap();
        let line = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
            line
        });
        soon("etcdctl has the lock", line).await.unwrap().trim().to_owned()
    }

    async fn end(mut self) {
        std::fs::write(self.end.path().join("end"), "").unwrap();
        let ended = tokio::task::spawn_blocking(move || self.process.wait().unwrap());
        assert!(soon("etcdctl ends", ended).await.unwrap().success());
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Its command ends by this, and would hold on to our output otherwise.
        let _ = std::fs::write(self.end.path().join("end"), "");
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_behind_etcdctl_sees_it_and_comes_next() {
    let (peer, mutex) = (Peer::connect().await, name());
    let mut theirs = Lock::begin(&mutex);
    let key = theirs.held().await;
    let locker = peer.simba.locker(mutex.clone());
    assert!(locker.try_lock().await.unwrap().is_none(), "broken: it is theirs");
    let holder = locker.last_holder().id.unwrap();
    assert_eq!(Some(holder.as_str()), key.rsplit('/').next(), "known by the end of its key");
    let ours = peer.contend(&mutex, long());
    sleep(Duration::from_millis(300)).await;
    assert!(!ours.is_owner(), "broken: two hold it");
    theirs.end().await;
    leads(&ours).await;
    ours.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_waits_behind_us_and_comes_next() {
    let (peer, mutex) = (Peer::connect().await, name());
    let ours = peer.contend(&mutex, long());
    leads(&ours).await;
    let mut theirs = Lock::begin(&mutex);
    let waits = soon("etcdctl waits", async {
        while peer.simba.operate().unwrap().read(&mutex).await.unwrap().waiters != Some(1) {
            sleep(Duration::from_millis(20)).await;
        }
    });
    waits.await;
    let last = peer.contend(&mutex, long());
    ours.stop().await.unwrap();
    theirs.held().await;
    assert!(!last.is_owner(), "broken: two hold it");
    theirs.end().await;
    leads(&last).await;
    last.stop().await.unwrap();
}
