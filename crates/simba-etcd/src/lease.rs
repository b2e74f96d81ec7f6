//! The lease at the store that all mutexes with one length of lease share, and its renewal.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use simba_core::spi::within;
use simba_core::{Error, Moment, Result};
use simba_net::batch::{Answers, BatchError, BatchLimits, Batcher, SendBatch};
use tokio_util::task::AbortOnDropHandle;

use crate::client::{Client, Compare, Failure, KeptAlive, Op, RangeRequest, Term, TxnRequest};
use crate::error::{failed, unavailable};
use crate::queue::revision_of;

/// The default limit of servers for the operations in one transaction.
const MAX_CHECKS: usize = 128;
/// The number of transactions in flight at once.
const MAX_IN_FLIGHT: usize = 8;
/// The longest time that a renewal waits for others to share its call.
const BATCH_WINDOW: Duration = Duration::from_millis(5);
/// The number of attempts at a renewal during which the servers change their leader.
const MAX_ATTEMPTS: usize = 3;

/// A lease at the store. All keys that were created under it are deleted when it ends.
#[derive(Debug)]
pub(crate) struct StoreLease {
    pub(crate) id: i64,
    proof: Mutex<QuorumProof>,
}

/// The last keep-alive that a quorum confirmed, or the grant.
#[derive(Clone, Copy, Debug)]
struct QuorumProof {
    /// Before the request was sent: the servers count the lease from some later moment.
    sent: Moment,
    ttl: Duration,
}

impl StoreLease {
    fn new(id: i64, sent: Moment, ttl: Duration) -> Arc<Self> {
        Arc::new(Self { id, proof: Mutex::new(QuorumProof { sent, ttl }) })
    }

    /// Returns the length that was granted last.
    pub(crate) fn ttl(&self) -> Duration {
        self.proof().ttl
    }

    /// Returns the moment until which the servers keep the lease for certain.
    pub(crate) fn until(&self) -> Moment {
        let proof = *self.proof();
        proof.sent + proof.ttl
    }

    fn record_proof(&self, sent: Moment, ttl: Duration) {
        let mut proof = self.proof();
        if proof.sent < sent {
            *proof = QuorumProof { sent, ttl };
        }
    }

    fn proof(&self) -> MutexGuard<'_, QuorumProof> {
        self.proof.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The lease of all contenders with one length of lease. It is granted again after it has ended.
#[derive(Debug)]
pub(crate) struct SharedLease {
    renewals: Arc<Renewals>,
    /// Calls without a key renew the lease only.
    checks: Arc<Batcher<Option<Check>, Option<Checked>>>,
    /// Locked by the task that requests a lease.
    granting: tokio::sync::Mutex<()>,
    _task: AbortOnDropHandle<()>,
}

/// A request to check that a key exists under the lease that it was created with.
#[derive(Debug)]
struct Check {
    lease: Arc<StoreLease>,
    key: String,
    revision: i64,
}

/// The result of a check for a key that exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked {
    /// The servers keep its lease until then. Counted from after the check was requested.
    pub(crate) until: Moment,
    /// The revision at which the key was seen.
    pub(crate) at: i64,
}

impl SharedLease {
    pub(crate) fn start(client: Arc<Client>, lease: Duration) -> Arc<Self> {
        let whole = lease.as_secs() + u64::from(lease.subsec_nanos() > 0);
        let seconds = i64::try_from(whole).unwrap_or(i64::MAX);
        let renewals = Renewals { client, seconds, current: Mutex::new(None), max_checks: MAX_CHECKS.into() };
        let renewals = Arc::new(renewals);
        let (time, window) = (renewals.length(), BATCH_WINDOW.min(lease / 100));
        let limits = BatchLimits { calls: usize::MAX, in_flight: 1, time, window };
        let checks = Arc::new(Batcher::new(Arc::clone(renewals.client.clock()), limits));
        let task = run(Arc::clone(&renewals), Arc::clone(&checks));
        let _task = AbortOnDropHandle::new(renewals.client.spawn(task));
        Arc::new(Self { renewals, checks, granting: tokio::sync::Mutex::new(()), _task })
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.renewals.client
    }

    /// Returns the granted length, or the requested one while there is no lease.
    pub(crate) fn length(&self) -> Duration {
        self.renewals.length()
    }

    /// Returns the lease; requests one if there is none.
    ///
    /// # Cancel safety
    ///
    /// A lease that is granted after the call was dropped ends by itself.
    pub(crate) async fn get_or_grant(&self) -> Result<Arc<StoreLease>> {
        let _one = self.granting.lock().await;
        if let Some(lease) = self.renewals.current() {
            return Ok(lease);
        }
        let sent = self.client().now();
        let granted = self.client().grant(self.renewals.seconds).await;
        let (id, ttl) = granted.map_err(|failure| failed("grant a lease", failure))?;
        let lease = StoreLease::new(id, sent, ttl);
        *self.renewals.slot() = Some(Arc::clone(&lease));
        Ok(lease)
    }

    /// Records that this lease has ended, and with it all its keys.
    pub(crate) fn set_ended(&self, lease: &Arc<StoreLease>) {
        self.renewals.set_ended(lease);
    }

    /// Renews the lease and checks by a quorum that this key exists. Returns `None` if it does not.
    ///
    /// Sends one request for all calls within a few milliseconds.
    pub(crate) async fn check(
        &self,
        lease: &Arc<StoreLease>,
        key: &str,
        revision: i64,
    ) -> Result<Option<Checked>> {
        let check = Check { lease: Arc::clone(lease), key: key.to_owned(), revision };
        self.checks.call_batched(Some(check)).await
    }

    /// Renews the lease, and has a quorum confirm that.
    pub(crate) async fn renew(&self) -> Result<()> {
        self.checks.call_batched(None).await.map(drop)
    }

    /// Revokes the lease, which deletes all its keys.
    pub(crate) async fn close(&self) {
        let lease = self.renewals.slot().take();
        if let Some(lease) = lease {
            let limit = lease.ttl() / 3;
            let _ = within(&**self.client().clock(), limit, self.client().revoke(lease.id)).await;
        }
    }

    pub(crate) fn is_current(&self, lease: &Arc<StoreLease>) -> bool {
        self.renewals.current().is_some_and(|now| Arc::ptr_eq(&now, lease))
    }
}

impl Drop for SharedLease {
    fn drop(&mut self) {
        let lease = self.renewals.slot().take();
        lease.iter().for_each(|lease| self.renewals.revoke(lease));
    }
}

/// Sends the checks, and renews the lease for waiters, whose turn it must not end before.
async fn run(renewals: Arc<Renewals>, checks: Arc<Batcher<Option<Check>, Option<Checked>>>) {
    let clock = renewals.client.clock();
    let renewing = async {
        loop {
            let length = renewals.length();
            let now = clock.now();
            let due = renewals.current().map_or(now, |lease| lease.proof().sent) + length / 3;
            if due > now {
                clock.sleep_until(due).await;
            } else if checks.call_batched(None).await.is_err() {
                // Waiters send no checks of their own that would retry the renewal.
                clock.sleep_until(clock.now() + length / 20).await;
            }
        }
    };
    tokio::join!(checks.run(&*renewals), renewing);
}

/// Renews a lease and answers the checks of one request.
#[derive(Debug)]
struct Renewals {
    client: Arc<Client>,
    /// The length to request, in whole seconds, the unit of etcd.
    seconds: i64,
    current: Mutex<Option<Arc<StoreLease>>>,
    /// The number of checks that the server accepts in a transaction, as far as known.
    max_checks: AtomicUsize,
}

impl SendBatch for Renewals {
    type Call = Option<Check>;
    type Answer = Option<Checked>;

    async fn send(&self, calls: &[Option<Check>]) -> Result<Answers<Option<Checked>>, BatchError> {
        let mut answers: Answers<_> = calls.iter().map(|_| Ok(None)).collect();
        let Some(lease) = self.current() else { return Ok(answers) };
        let is_open = |call: &Option<Check>| {
            // The keys of another lease ended with it.
            call.as_ref().is_none_or(|check| Arc::ptr_eq(&check.lease, &lease))
        };
        let mut open: Vec<usize> = (0..calls.len()).filter(|at| is_open(&calls[*at])).collect();
        for _ in 0..MAX_ATTEMPTS {
            if open.is_empty() {
                break;
            }
            let sent = self.client.now();
            let Some(kept) = self.keep_alive(&lease).await.map_err(renewal_failed)? else {
                self.set_ended(&lease);
                return Ok(answers);
            };
            open = self.confirm(&lease, sent, kept, calls, open, &mut answers).await;
        }
        // Whether the new leader counts the renewal is unknown.
        let leader_changed = || unavailable("the servers elected another leader during the renewal");
        open.into_iter().for_each(|at| answers[at] = Err(leader_changed()));
        if lease.until() <= self.client.now() {
            // Not confirmed for its whole length: it has no holder, and its keys block other contenders.
            self.set_ended(&lease);
            self.revoke(&lease);
        }
        Ok(answers)
    }
}

impl Renewals {
    /// Sends a keep-alive. Returns `None` if the lease has ended.
    async fn keep_alive(&self, lease: &StoreLease) -> Result<Option<KeptAlive>, Failure> {
        let limit = self.client.call_limit();
        let kept = within(&**self.client.clock(), limit, self.client.keep_alive(lease.id)).await;
        let late = || unavailable(format!("the server did not renew the lease within {limit:?}"));
        kept.unwrap_or_else(|| Err(Failure::Unsent(late())))
    }

    /// Sends the open checks to a quorum. Returns those that it could not confirm because the leader has changed.
    async fn confirm(
        &self,
        lease: &StoreLease,
        sent: Moment,
        kept: KeptAlive,
        calls: &[Option<Check>],
        mut open: Vec<usize>,
        answers: &mut Answers<Option<Checked>>,
    ) -> Vec<usize> {
        let mut unconfirmed = Vec::new();
        while !open.is_empty() {
            let batches = open.chunks(self.max_checks.load(Ordering::Relaxed)).map(<[usize]>::to_vec);
            let ask = |batch: Vec<usize>| async { (self.ask(calls, &batch).await, batch) };
            let requests: Vec<_> = batches.map(ask).collect();
            let replies: Vec<_> = stream::iter(requests).buffer_unordered(MAX_IN_FLIGHT).collect().await;
            let mut too_many = Vec::new();
            for (reply, batch) in replies {
                match reply {
                    Ok(reply) if !reply.term.confirms(kept.term) => unconfirmed.extend(batch),
                    Ok(reply) => {
                        lease.record_proof(sent, kept.ttl);
                        let checked = Checked { until: sent + kept.ttl, at: reply.revision };
                        for (at, exists) in batch.iter().zip(reply.exists) {
                            answers[*at] = Ok(exists.then_some(checked));
                        }
                    }
                    Err(failure) if failure.is_too_many_operations() && batch.len() > 1 => {
                        self.max_checks.fetch_min(batch.len().div_ceil(2), Ordering::Relaxed);
                        too_many.extend(batch);
                    }
                    Err(failure) => {
                        batch.iter().for_each(|at| answers[*at] = Err(renewal_failed(failure.clone())));
                    }
                }
            }
            open = too_many;
        }
        unconfirmed
    }

    /// Sends the checks with these indices as one transaction.
    async fn ask(&self, calls: &[Option<Check>], batch: &[usize]) -> Result<QuorumAnswer, Failure> {
        let checks = || batch.iter().filter_map(|at| calls[*at].as_ref());
        let created = |check: &Check| Compare::created_in(check.revision, check.key.clone().into_bytes());
        let read = |check: &Check| Op::Range(RangeRequest::of_key(&check.key)).into();
        let txn = TxnRequest {
            compare: checks().map(created).collect(),
            // Without a read, the member would answer the transaction without a quorum.
            success: vec![Op::Range(self.client.quorum_read()).into()],
            // Finds the keys that are missing.
            failure: checks().map(read).collect(),
        };
        let mut answer = self.client.txn(txn).await?;
        let term = Term::of(answer.header.as_ref());
        let revision = revision_of(answer.header.as_ref()).unwrap_or_default();
        let succeeded = answer.succeeded;
        let mut found = answer.ranges().map(|kvs| kvs.first().map(|kv| kv.create_revision));
        let mut exists = |check: &Check| found.next().flatten() == Some(check.revision);
        let exists = |at: &usize| succeeded || calls[*at].as_ref().is_none_or(&mut exists);
        let exists = batch.iter().map(exists).collect();
        Ok(QuorumAnswer { term, revision, exists })
    }

    fn length(&self) -> Duration {
        let requested = Duration::from_secs(u64::try_from(self.seconds).unwrap_or(1));
        self.current().map_or(requested, |lease| lease.ttl())
    }

    fn set_ended(&self, lease: &Arc<StoreLease>) {
        let mut slot = self.slot();
        if slot.as_ref().is_some_and(|now| Arc::ptr_eq(now, lease)) {
            tracing::debug!(lease = lease.id, "the lease has ended");
            *slot = None;
        }
    }

    /// Revokes a lease in the background.
    fn revoke(&self, lease: &StoreLease) {
        let (client, id) = (Arc::clone(&self.client), lease.id);
        drop(self.client.spawn(async move { drop(client.revoke(id).await) }));
    }

    fn current(&self) -> Option<Arc<StoreLease>> {
        self.slot().clone()
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<StoreLease>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn renewal_failed(failure: Failure) -> Error {
    failed("renew", failure)
}

/// The answer of a quorum to a batch of checks.
struct QuorumAnswer {
    term: Term,
    revision: i64,
    /// Whether each key exists.
    exists: Vec<bool>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn a_lease_counts_from_before_its_last_confirmed_request_was_sent() {
        let lease = StoreLease::new(7, at(1), Duration::from_secs(10));
        assert_eq!(lease.until(), at(11));
        lease.record_proof(at(4), Duration::from_secs(8));
        lease.record_proof(at(2), Duration::from_secs(60));
        assert_eq!(lease.until(), at(12), "the request that was sent last counts");
        assert_eq!(lease.ttl(), Duration::from_secs(8));
    }
}
