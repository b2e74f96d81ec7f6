//! A contender's own key: its place in the queue.

use std::sync::Arc;
use std::time::Duration;

use simba_net::Backoff;
use tokio::sync::oneshot;

use crate::client::{Client, Failure, LeaseInUse, TxnResponse, heard};
use crate::error::no_chance;
use crate::tenancy::{Life, Tenancy};

/// Servers give up on what they could not carry out, a few seconds later. So long after it, what was asked for and not
/// answered may still happen.
const LATE: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(5), Duration::from_secs(30)];
/// Between two tries to delete what nobody needs any more.
const PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

pub(crate) type Joining = oneshot::Receiver<Result<TxnResponse, Failure>>;

/// A key that was asked for.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) key: String,
    pub(crate) life: Arc<Life>,
    /// When it was made; nothing if that is not known.
    pub(crate) revision: Option<i64>,
    /// When it was last seen to be there.
    pub(crate) seen_at: i64,
    /// It is given up: a request to delete it may be under way, and carried out at any time.
    pub(crate) is_left: bool,
    /// The request that makes it, as long as nobody has heard its outcome.
    joining: Option<Joining>,
    /// A request had no answer: it may still be carried out, at any time.
    unsure: bool,
    _in_use: LeaseInUse,
}

impl Place {
    /// A key that nobody else has, not even another contender with the same lease.
    pub(crate) fn new(prefix: &str, life: Arc<Life>, client: &Client) -> simba_core::Result<Self> {
        let mut nonce = [0; 8];
        getrandom::fill(&mut nonce).map_err(|_| no_chance())?;
        let key = format!("{prefix}{:x}-{:016x}", life.id, u64::from_be_bytes(nonce));
        let _in_use = client.use_lease(life.ttl());
        Ok(Self {
            key,
            life,
            revision: None,
            seen_at: 0,
            is_left: false,
            joining: None,
            unsure: false,
            _in_use,
        })
    }

    /// A request to make it is under way.
    pub(crate) fn begun(&mut self, joining: Joining) {
        self.joining = Some(joining);
    }

    /// The outcome of the request that is under way; nothing without one.
    ///
    /// # Cancel safety
    ///
    /// The outcome is kept for the next call.
    pub(crate) async fn outcome(&mut self) -> Option<Result<TxnResponse, Failure>> {
        let outcome = heard(self.joining.as_mut()?).await;
        self.joining = None;
        self.unsure |= outcome.as_ref().is_err_and(Failure::is_unsure);
        Some(outcome)
    }

    /// It was made then.
    pub(crate) const fn made(&mut self, revision: i64) {
        (self.revision, self.seen_at) = (Some(revision), revision);
    }

    /// Whether it was never asked for, as far as anybody knows.
    fn is_nothing(&self) -> bool {
        self.revision.is_none() && self.joining.is_none() && !self.unsure
    }

    /// Deletes it in the background, and again for as long as a request to make it may be carried out.
    pub(crate) fn forget(mut self, tenancy: &Arc<Tenancy>) {
        if self.is_nothing() {
            return;
        }
        let (weak, clock) = (Arc::downgrade(tenancy), Arc::clone(tenancy.client().clock()));
        tenancy.client().spawn(async move {
            self.outcome().await;
            let mut late = LATE.iter().filter(|_| self.unsure);
            let mut backoff = Backoff::new(PAUSE, MAX_PAUSE);
            // It ends with its lease, and that with whoever has it.
            while let Some(tenancy) = weak.upgrade().filter(|tenancy| tenancy.is_living(&self.life)) {
                let deleted = tenancy.client().delete(&self.key).await;
                drop(tenancy);
                let pause = match deleted {
                    Ok(()) => late.next().copied(),
                    Err(failure) => {
                        tracing::debug!(?failure, key = self.key, "a key that is not needed stays for now");
                        Some(backoff.pause())
                    }
                };
                let Some(pause) = pause else { return };
                clock.sleep_until(clock.now() + pause).await;
            }
        });
    }

    /// Whether a request to make it may still be carried out after it was deleted.
    pub(crate) const fn is_unsure(&self) -> bool {
        self.unsure
    }
}
