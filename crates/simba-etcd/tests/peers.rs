//! Contention with etcd's own lock: `etcdctl lock` on the same prefix, which has the order of Go's `concurrency.Mutex`.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::process::{Child, Stdio};
use std::time::Duration;

use common::{Peer, etcdctl, leads, long, name, sees, soon};
use simba_core::MutexName;
use simba_servers::shared;
use tokio::time::sleep;

/// A process of `etcdctl lock` with a command that runs under the lock.
struct Lock {
    process: Child,
    /// The command ends, and with it the lock, when the file `end` appears in this directory.
    end: tempfile::TempDir,
}

impl Lock {
    /// Starts the process, which waits until it has the lock.
    fn begin(mutex: &MutexName) -> Self {
        let end = tempfile::tempdir().unwrap();
        let script = "echo $ETCD_LOCK_KEY; while [ ! -e \"$0\" ]; do sleep 0.02; done";
        let file = end.path().join("end").display().to_string();
        let mut command = etcdctl(&shared("SIMBA_TCK_ETCD"));
        command.args(["lock", &format!("simba/{mutex}"), "--", "sh", "-c", script, &file]);
        Self { process: command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap(), end }
    }

    /// Waits until it has the lock, and returns its key.
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
        // Ends the command, which would keep the output of this process open otherwise.
        let _ = std::fs::write(self.end.path().join("end"), "");
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_behind_etcdctl_sees_it_and_acquires_next() {
    let (peer, mutex) = (Peer::connect().await, name());
    let mut theirs = Lock::begin(&mutex);
    let key = theirs.held().await;
    let locker = peer.simba.locker(mutex.clone());
    assert!(locker.try_lock().await.unwrap().is_none(), "broken: etcdctl holds it");
    let holder = locker.last_holder().id.unwrap();
    assert_eq!(Some(holder.as_str()), key.rsplit('/').next(), "identified by the end of its key");
    let ours = peer.contend(&mutex, long());
    soon("a waiter sees etcdctl", async {
        while !ours.owner().is_owner(&holder) {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    assert!(!ours.is_owner(), "broken: two hold it");
    theirs.end().await;
    leads(&ours).await;
    ours.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_waits_behind_simba_and_acquires_next() {
    let (peer, mutex) = (Peer::connect().await, name());
    let ours = peer.contend(&mutex, long());
    let tenure = leads(&ours).await;
    let mut theirs = Lock::begin(&mutex);
    let waits = soon("etcdctl waits", async {
        while peer.simba.operate().unwrap().read(&mutex).await.unwrap().waiters != Some(1) {
            sleep(Duration::from_millis(20)).await;
        }
    });
    waits.await;
    let last = peer.contend(&mutex, long());
    sees(&last, &tenure).await;
    ours.stop().await.unwrap();
    theirs.held().await;
    assert!(!last.is_owner(), "broken: two hold it");
    theirs.end().await;
    leads(&last).await;
    last.stop().await.unwrap();
}
