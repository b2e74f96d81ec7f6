//! One lease at the store for all mutexes of one length, and how it is kept.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use simba_core::{Moment, Result, within};
use tokio::sync::{mpsc, oneshot};

use crate::client::{Client, Compare, Failure, KeptAlive, Op, RangeRequest, Reign, TxnRequest, heard};
use crate::error::{another_reign, failed, unanswered};
use crate::queue::revision_of;

/// What a server takes in one transaction unless it is told otherwise.
const MOST_CHECKS: usize = 128;
/// How many transactions are under way at once.
const AT_ONCE: usize = 8;
/// How long a renewal waits for others, at most.
const GATHERING: Duration = Duration::from_millis(5);
/// How often a renewal is tried again in which the servers changed their leader.
const REIGNS: usize = 3;

/// A lease at the store: everything that was made with it ends with it.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) id: i64,
    proven: Mutex<Proof>,
}

/// Until when it lives for sure.
#[derive(Clone, Copy, Debug)]
struct Proof {
    /// Before it was asked for: what is granted holds from some moment after.
    sent: Moment,
    ttl: Duration,
}

impl Life {
    fn new(id: i64, sent: Moment, ttl: Duration) -> Arc<Self> {
        Arc::new(Self { id, proven: Mutex::new(Proof { sent, ttl }) })
    }

    /// What was granted last.
    pub(crate) fn ttl(&self) -> Duration {
        self.proof().ttl
    }

    /// How much it has left for sure at this moment.
    pub(crate) fn left(&self, at: Moment) -> Duration {
        let proof = *self.proof();
        proof.ttl.saturating_sub(at.saturating_since(proof.sent))
    }

    fn prove(&self, sent: Moment, ttl: Duration) {
        let mut proof = self.proof();
        if proof.sent < sent {
            *proof = Proof { sent, ttl };
        }
    }

    fn proof(&self) -> MutexGuard<'_, Proof> {
        self.proven.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The lease of all contenders with leases of one length.
#[derive(Debug)]
pub(crate) struct Tenancy {
    client: Arc<Client>,
    /// What is asked for, in whole seconds, as servers count.
    wanted: i64,
    life: Mutex<Option<Arc<Life>>>,
    /// One asks for a lease at a time.
    granting: tokio::sync::Mutex<()>,
    checks: mpsc::UnboundedSender<Check>,
}

/// Whether a key is there, under the lease it was made with.
#[derive(Debug)]
struct Check {
    life: Arc<Life>,
    key: String,
    revision: i64,
    /// Nothing if it is gone.
    to: oneshot::Sender<Result<Option<Checked>, Failure>>,
}

/// A key that is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked {
    /// For how long its lease keeps it, from after the check was asked for.
    pub(crate) remaining: Duration,
    /// When it was seen.
    pub(crate) at: i64,
}

impl Tenancy {
    pub(crate) fn start(client: Arc<Client>, lease: Duration) -> Arc<Self> {
        let (checks, inbox) = mpsc::unbounded_channel();
        let whole = lease.as_secs() + u64::from(lease.subsec_nanos() > 0);
        let this = Arc::new(Self {
            wanted: i64::try_from(whole).unwrap_or(i64::MAX),
            life: Mutex::new(None),
            granting: tokio::sync::Mutex::new(()),
            checks,
            client,
        });
        let tenancy = Arc::downgrade(&this);
        let keeper = Keeper { tenancy, inbox, most: MOST_CHECKS, waiting: Vec::new(), failed: false };
        this.client.spawn(keeper.run());
        this
    }

    pub(crate) const fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// What a holder gets, or asks for.
    pub(crate) fn length(&self) -> Duration {
        let asked = Duration::from_secs(u64::try_from(self.wanted).unwrap_or(1));
        self.living().map_or(asked, |life| life.ttl())
    }

    /// The lease; asks for one if there is none.
    ///
    /// # Cancel safety
    ///
    /// A lease that nobody waited for ends by itself.
    pub(crate) async fn life(&self) -> Result<Arc<Life>> {
        let _one = self.granting.lock().await;
        if let Some(life) = self.living() {
            return Ok(life);
        }
        let sent = self.client.now();
        let granted = self.client.grant(self.wanted).await;
        let (id, ttl) = granted.map_err(|failure| failed("be granted a lease", failure))?;
        let life = Life::new(id, sent, ttl);
        *self.slot() = Some(Arc::clone(&life));
        Ok(life)
    }

    /// That lease is gone, and all that it had.
    pub(crate) fn ended(&self, life: &Arc<Life>) {
        let mut slot = self.slot();
        if slot.as_ref().is_some_and(|now| Arc::ptr_eq(now, life)) {
            tracing::debug!(lease = life.id, "the lease has ended");
            *slot = None;
        }
    }

    /// Renews the lease and asks whether this key is still there, by a quorum. Nothing if it is gone.
    pub(crate) async fn check(
        &self,
        life: &Arc<Life>,
        key: &str,
        revision: i64,
    ) -> Result<Option<Checked>, Failure> {
        let (to, mut outcome) = oneshot::channel();
        let check = Check { life: Arc::clone(life), key: key.to_owned(), revision, to };
        // A closed one is told by the dropped sender.
        let _ = self.checks.send(check);
        heard(&mut outcome).await
    }

    /// Ends the lease, and with it all that it has.
    pub(crate) async fn close(&self) {
        let life = self.slot().take();
        if let Some(life) = life {
            let limit = life.ttl() / 3;
            let _ = within(&**self.client.clock(), limit, self.client.revoke(life.id)).await;
        }
    }

    /// Ends the lease in the background.
    fn revoke(&self, life: &Life) {
        let (client, id) = (Arc::clone(&self.client), life.id);
        self.client.spawn(async move { drop(client.revoke(id).await) });
    }

    pub(crate) fn is_living(&self, life: &Arc<Life>) -> bool {
        self.living().is_some_and(|now| Arc::ptr_eq(&now, life))
    }

    fn living(&self) -> Option<Arc<Life>> {
        self.slot().clone()
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<Life>>> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        let life = self.slot().take();
        life.iter().for_each(|life| self.revoke(life));
    }
}

/// The one task that renews a lease.
struct Keeper {
    tenancy: std::sync::Weak<Tenancy>,
    inbox: mpsc::UnboundedReceiver<Check>,
    /// How many checks the server takes at a time, as far as is known.
    most: usize,
    waiting: Vec<Check>,
    /// The last try to renew was in vain.
    failed: bool,
}

impl Keeper {
    async fn run(mut self) {
        while let Some(tenancy) = self.next().await {
            self.gather(&tenancy).await;
            let checks = mem::take(&mut self.waiting);
            let Some(life) = tenancy.living() else {
                checks.into_iter().for_each(|check| drop(check.to.send(Ok(None))));
                continue;
            };
            let (of_it, others): (Vec<_>, Vec<_>) =
                checks.into_iter().partition(|check| Arc::ptr_eq(&check.life, &life));
            others.into_iter().for_each(|check| drop(check.to.send(Ok(None))));
            self.failed = !self.renew(&tenancy, &life, of_it).await;
        }
    }

    /// Waits for something to check, or for the time to renew; nothing once nobody is left.
    async fn next(&mut self) -> Option<Arc<Tenancy>> {
        let tenancy = self.tenancy.upgrade()?;
        let clock = Arc::clone(tenancy.client.clock());
        // Who waits has nobody else to try again for it.
        let pause = tenancy.length() / if self.failed { 20 } else { 3 };
        drop(tenancy);
        tokio::select! {
            biased;
            check = self.inbox.recv() => self.waiting.push(check?),
            () = clock.sleep_until(clock.now() + pause) => {}
        }
        self.tenancy.upgrade()
    }

    /// Lets renewals that are due together go together.
    async fn gather(&mut self, tenancy: &Tenancy) {
        if self.waiting.is_empty() {
            return;
        }
        let clock = Arc::clone(tenancy.client.clock());
        let mut over = clock.sleep_until(clock.now() + GATHERING.min(tenancy.length() / 100));
        loop {
            tokio::select! {
                biased;
                () = &mut over => break,
                check = self.inbox.recv() => match check {
                    Some(check) => self.waiting.push(check),
                    None => break,
                },
            }
        }
    }

    /// Renews the lease, and answers the checks. Whether that was of any use.
    async fn renew(&mut self, tenancy: &Tenancy, life: &Arc<Life>, mut checks: Vec<Check>) -> bool {
        let began = tenancy.client.now();
        for _ in 0..REIGNS {
            let sent = tenancy.client.now();
            let (clock, patience) = (tenancy.client.clock(), tenancy.client.patience());
            let kept = within(&**clock, patience, tenancy.client.keep_alive(life.id)).await;
            let kept = match kept.unwrap_or_else(|| Err(Failure::Unsent(unanswered(patience)))) {
                Ok(Some(kept)) => kept,
                Ok(None) => {
                    tenancy.ended(life);
                    answer_all(checks, &Ok(None));
                    return true;
                }
                Err(failure) => {
                    answer_all(checks, &Err(failure));
                    return false;
                }
            };
            checks = self.confirm(tenancy, life, sent, kept, checks).await;
            if checks.is_empty() {
                return settled(tenancy, life, began);
            }
        }
        answer_all(checks, &Err(Failure::Unsent(another_reign())));
        settled(tenancy, life, began)
    }

    /// Asks a quorum; gives back the checks that it could not confirm since another leader reigns.
    async fn confirm(
        &mut self,
        tenancy: &Tenancy,
        life: &Arc<Life>,
        sent: Moment,
        kept: KeptAlive,
        mut checks: Vec<Check>,
    ) -> Vec<Check> {
        checks.retain(|check| !check.to.is_closed());
        let mut again = Vec::new();
        loop {
            let mut too_many = Vec::new();
            let asked = batches(checks, self.most).into_iter().map(|batch| ask(&tenancy.client, batch));
            let answers: Vec<_> = stream::iter(asked).buffer_unordered(AT_ONCE).collect().await;
            for (batch, answer) in answers {
                match answer {
                    Ok(seen) if !seen.by.confirms(kept.by) => again.extend(batch),
                    Ok(seen) => {
                        life.prove(sent, kept.ttl);
                        let checked = Checked { remaining: kept.ttl, at: seen.at };
                        for (check, there) in batch.into_iter().zip(seen.there) {
                            let _ = check.to.send(Ok(there.then_some(checked)));
                        }
                    }
                    Err(failure) if failure.is_too_many() && batch.len() > 1 => {
                        self.most = self.most.min(batch.len().div_ceil(2));
                        too_many.extend(batch);
                    }
                    Err(failure) => answer_all(batch, &Err(failure)),
                }
            }
            if too_many.is_empty() {
                return again;
            }
            checks = too_many;
        }
    }
}

/// Whether a lease that was kept alive is known to live, by what was asked since this moment.
///
/// One of which nobody knew that for all of its length is of no use here, and in everybody's way there: it ends.
fn settled(tenancy: &Tenancy, life: &Arc<Life>, since: Moment) -> bool {
    if life.left(tenancy.client.now()).is_zero() {
        tenancy.ended(life);
        tenancy.revoke(life);
    }
    life.proof().sent >= since
}

fn answer_all(checks: Vec<Check>, answer: &Result<Option<Checked>, Failure>) {
    // Who does not listen any more has nothing to undo: a check changes nothing.
    checks.into_iter().for_each(|check| drop(check.to.send(answer.clone())));
}

/// At least one: also without anything to check, a quorum has to say that the lease was kept.
fn batches(mut checks: Vec<Check>, most: usize) -> Vec<Vec<Check>> {
    let mut batches = Vec::new();
    loop {
        let rest = checks.split_off(checks.len().min(most));
        batches.push(mem::replace(&mut checks, rest));
        if checks.is_empty() {
            return batches;
        }
    }
}

/// What a quorum said.
struct Seen {
    by: Reign,
    at: i64,
    /// Whether each key is there.
    there: Vec<bool>,
}

async fn ask(client: &Client, batch: Vec<Check>) -> (Vec<Check>, Result<Seen, Failure>) {
    let created = |check: &Check| Compare::created_in(check.revision, check.key.clone().into_bytes());
    let look = |check: &Check| Op::Range(RangeRequest::of_key(&check.key)).into();
    let txn = TxnRequest {
        compare: batch.iter().map(created).collect(),
        // A transaction without any read is answered by the member alone.
        success: vec![Op::Range(client.look()).into()],
        // Some are gone: which?
        failure: batch.iter().map(look).collect(),
    };
    let answer = client.txn(txn).await.map(|mut answer| {
        let by = Reign::of(answer.header.as_ref());
        let at = revision_of(answer.header.as_ref()).unwrap_or_default();
        let there = match answer.succeeded {
            true => vec![true; batch.len()],
            false => {
                let found = answer.ranges().map(|kvs| kvs.first().map(|kv| kv.create_revision));
                let found: Vec<_> = found.collect();
                batch.iter().zip(found).map(|(check, found)| found == Some(check.revision)).collect()
            }
        };
        Seen { by, at, there }
    });
    (batch, answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn a_lease_counts_from_before_the_last_proof_was_asked_for() {
        let life = Life::new(7, at(1), Duration::from_secs(10));
        assert_eq!(life.left(at(5)), Duration::from_secs(6));
        life.prove(at(4), Duration::from_secs(8));
        life.prove(at(2), Duration::from_secs(60));
        assert_eq!(life.left(at(5)), Duration::from_secs(7), "the last one asked counts");
        assert_eq!(life.left(at(60)), Duration::ZERO);
        assert_eq!(life.ttl(), Duration::from_secs(8));
    }
}
