//! A contender's key, which is its entry in the queue.

use std::sync::Arc;
use std::time::Duration;

use simba_net::Backoff;
use simba_net::queue::Proof;
use tokio::sync::oneshot;

use crate::client::{Client, Failure, LeaseInUse, TxnResponse, wait_for};
use crate::error::unavailable;
use crate::lease::{SharedLease, StoreLease};
use crate::queue::{revision_of, token};

/// The delays after which a deletion is repeated if the creation was not answered: servers time out pending requests
/// within seconds, and until then may still execute the creation.
const REPEATS: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(5), Duration::from_secs(30)];
/// The bounds of the pause after a failed deletion.
const PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

pub(crate) type PendingTxn = oneshot::Receiver<Result<TxnResponse, Failure>>;

/// A key whose creation was requested, or is about to be.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) lease: Arc<StoreLease>,
    /// The revision that created the key, if known.
    pub(crate) revision: Option<i64>,
    /// The last revision at which the key was seen.
    pub(crate) seen_at: i64,
    /// The request that creates the key, until its outcome was read.
    pub(crate) pending: Option<PendingTxn>,
    /// Whether a creation was not answered: the servers may still execute it, also after the key was deleted.
    pub(crate) is_ambiguous: bool,
    _in_use: LeaseInUse,
}

impl Entry {
    /// Creates an entry with a unique key, also among contenders with the same lease.
    pub(crate) fn new(prefix: &str, lease: Arc<StoreLease>, client: &Client) -> simba_core::Result<Self> {
        let mut nonce = [0; 8];
        getrandom::fill(&mut nonce)
            .map_err(|_| unavailable("the operating system returned no random bytes"))?;
        let key = format!("{prefix}{:x}-{:016x}", lease.id, u64::from_be_bytes(nonce));
        let _in_use = client.use_lease(lease.ttl());
        Ok(Self { key, lease, revision: None, seen_at: 0, pending: None, is_ambiguous: false, _in_use })
    }

    /// Waits for the outcome of the pending request, and records it; `None` without one.
    ///
    /// # Cancel safety
    ///
    /// The outcome is kept for the next call.
    pub(crate) async fn outcome(&mut self) -> Option<Result<TxnResponse, Failure>> {
        let outcome = wait_for(self.pending.as_mut()?).await;
        self.pending = None;
        self.is_ambiguous |= outcome.as_ref().is_err_and(Failure::is_ambiguous);
        // Also for a caller that only deletes the key: if that fails, the key has to be known.
        if let Ok(answer) = &outcome
            && answer.succeeded
            && let Ok(made) = revision_of(answer.header.as_ref())
        {
            self.set_created(made);
        }
        Some(outcome)
    }

    /// Records the revision that created the key.
    pub(crate) const fn set_created(&mut self, revision: i64) {
        (self.revision, self.seen_at) = (Some(revision), revision);
    }

    /// Returns the last proof of the lease for the key that this revision created.
    pub(crate) fn proof(&self, revision: i64) -> Proof {
        Proof { token: token(revision), until: self.lease.until() }
    }

    /// Returns whether the key cannot exist, now or later.
    fn cannot_exist(&self) -> bool {
        self.revision.is_none() && self.pending.is_none() && !self.is_ambiguous
    }

    /// Deletes the key in the background, and again for as long as the servers may execute a request to create it.
    pub(crate) fn delete_in_background(mut self, shared: &Arc<SharedLease>) {
        if self.cannot_exist() {
            return;
        }
        let (weak, clock) = (Arc::downgrade(shared), Arc::clone(shared.client().clock()));
        let deleting = async move {
            self.outcome().await;
            let mut repeats = REPEATS.iter().filter(|_| self.is_ambiguous);
            let mut backoff = Backoff::new(PAUSE, MAX_PAUSE);
            // The key ends with its lease, which ends when its last user drops it.
            while let Some(shared) = weak.upgrade().filter(|shared| shared.is_current(&self.lease)) {
                let deleted = shared.client().delete(&self.key).await;
                drop(shared);
                let pause = match deleted {
                    Ok(()) => repeats.next().copied(),
                    Err(failure) => {
                        tracing::debug!(?failure, key = self.key, "cannot delete an unused key; retrying");
                        Some(backoff.pause())
                    }
                };
                let Some(pause) = pause else { return };
                clock.sleep_until(clock.now() + pause).await;
            }
        };
        drop(shared.client().spawn(deleting));
    }
}
