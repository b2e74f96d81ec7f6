//! One contender or observer at the store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use simba_core::{
    Answer, Claim, ContenderId, ErrorKind, FencingToken, Holding, Intent, Lease, Listener, Ownership, Prior,
    Result, Session, within,
};

use crate::backend::Shared;
use crate::config::WaitReplicas;
use crate::error;
use crate::pipe::{Haste, Pipe};
use crate::resp::Reply;
use crate::scripts::{Arg, Caller, Invocation, Script, Usual, key};
use crate::subscriber::Channel;

/// How long a waiter waits for its subscription before it enters the queue without one.
const HEARING: Duration = Duration::from_millis(500);
/// How long one call may go on removing dead waiters from the queue.
const PASSING: Duration = Duration::from_secs(2);
/// Redis counts leases in whole milliseconds, from one that has begun.
const ROUNDING: Duration = Duration::from_millis(1);

pub(crate) struct RedisSession {
    shared: Arc<Shared>,
    claim: Claim,
    /// See [`Caller`].
    nonce: u64,
    /// When it first wanted what it could not have, in microseconds of the server's time; 0 for never.
    place: u64,
    /// Was told that it is in the queue.
    entered: bool,
    ears: Option<Box<[Listener<Channel>]>>,
    /// Heard from the server that it will be told.
    listens: bool,
    holds: bool,
    /// May stand in the queue.
    queued: bool,
    /// Had to wait for what it holds: most likely others wait too.
    waited: bool,
    /// A release is under way, or was not answered.
    left: bool,
    /// For how long its last look promised the mutex to another that is most likely gone.
    promised: Duration,
}

impl RedisSession {
    pub(crate) fn new(shared: Arc<Shared>, claim: Claim) -> Self {
        let nonce = fastrand::u64(..);
        let (place, entered, ears, listens) = (0, false, None, false);
        let (holds, queued, waited, left) = (false, false, false, false);
        Self {
            shared,
            claim,
            nonce,
            place,
            entered,
            ears,
            listens,
            holds,
            queued,
            waited,
            left,
            promised: Duration::ZERO,
        }
    }

    async fn ask(&self, prior: Prior) -> Result<(Reply, Pipe)> {
        let lease = &self.claim.lease;
        let lasts = whole_millis((lease.poll() * 2).max(lease.ttl()));
        let (caller, total) = (self.caller(), whole_millis(lease.total()));
        let args = [
            Arg::Text(self.claim.contender.as_str()),
            Arg::Caller(caller),
            Arg::Number(total),
            match prior {
                Prior::Nothing if self.place == 0 => Arg::Text("-"),
                Prior::Nothing => Arg::Text("~"),
                Prior::Held => Arg::Text("+"),
                Prior::Lapsed(token) => Arg::Number(token.get()),
                _ => Arg::Text("?"),
            },
            Arg::Place { intent: self.intent(), place: self.place, lasts, listens: self.listens },
        ];
        // A renewal comes long before it is needed, so it may wait for company; everyone else waits for its answer.
        let haste = if prior == Prior::Held { Haste::Leisure } else { Haste::Now };
        let usual = match prior {
            Prior::Nothing if self.place == 0 => Some(Usual::First(caller, total)),
            // Renewals go before the releases of a batch, and one of ours may be in it.
            Prior::Held if !self.left => Some(Usual::Renew(caller, total)),
            _ => None,
        };
        let call = Invocation::new(Script::Contend, &self.claim.mutex, &args);
        self.shared.route.invoke(&Invocation { haste, usual, ..call }).await
    }

    /// What the caller wants, in upper case where publishing tells who is alive.
    fn intent(&self) -> &'static str {
        let standalone = self.shared.route.is_standalone();
        let letters = match self.claim.intent {
            Intent::Queue if self.place == 0 => ["f", "F"],
            Intent::Queue if !self.entered => ["e", "E"],
            Intent::Queue => ["q", "Q"],
            _ => ["t", "T"],
        };
        letters[usize::from(standalone)]
    }

    /// Asks once, and understands the answer.
    async fn look(&mut self, prior: Prior) -> Result<(Answer, Pipe)> {
        let enters = self.place > 0;
        let (reply, pipe) = self.ask(prior).await?;
        let answer = self.understand(&reply)?;
        self.entered = enters;
        Ok((answer, pipe))
    }

    /// Whether it is to enter the queue: it was told its place, and that another comes first.
    fn enters(&self, answer: &Answer) -> bool {
        let passed = match answer {
            Answer::Ours(_) => false,
            Answer::Held(seen) => seen.owner != self.claim.contender,
            Answer::Vacant => true,
        };
        passed && self.place > 0 && !self.entered
    }

    /// Looks again at the end of a promise that its own look made to a waiter that is most likely gone. Each look removes
    /// one of those, so a hundred would cost a hundred pauses, each longer than the last.
    async fn pass_the_dead(&mut self, prior: Prior, first: Answer, pipe: Pipe) -> Result<(Answer, Pipe)> {
        let clock = Arc::clone(&self.shared.context.clock);
        let end = clock.now() + PASSING.min(self.claim.lease.ttl() / 6);
        let mut last = (first, pipe);
        loop {
            let promised = std::mem::take(&mut self.promised);
            if !matches!(last.0, Answer::Vacant) || promised.is_zero() || clock.now() >= end {
                return Ok(last);
            }
            clock.sleep_until(clock.now() + promised).await;
            last = self.look(prior).await?;
        }
    }

    /// Listens before it enters the queue, so that nobody is in there whom no message reaches: who dies before
    /// it listens delays nobody. Should the subscription be late, it goes on without.
    async fn hear(&mut self) {
        if self.listens {
            return;
        }
        let limit = HEARING.min(self.claim.lease.ttl() / 20);
        let clock = Arc::clone(&self.shared.context.clock);
        if within(&*clock, limit, self.rung()).await.is_some() {
            // Who waits for a change is told of the subscription too, as every session promises.
            self.ears.iter().flatten().for_each(Listener::ring);
        }
    }

    /// Waits for a message, the first of which says that there will be more.
    async fn rung(&mut self) {
        if self.ears.is_none() {
            let listen = |channel| self.shared.ears.listen(channel);
            self.ears = Some(self.channels().iter().map(listen).collect());
        }
        match self.ears.as_deref_mut() {
            Some([one, other]) => tokio::select! {
                biased;
                () = one.rung() => {}
                () = other.rung() => {}
            },
            Some([one]) => one.rung().await,
            _ => std::future::pending().await,
        }
        self.listens = true;
    }

    /// What the fence says of this session when it holds.
    fn caller(&self) -> Caller<'_> {
        let transition = whole_millis(self.claim.lease.transition());
        Caller { nonce: self.nonce, transition, contender: self.claim.contender.as_str() }
    }

    /// The arguments of a release.
    fn leaving(&self, holding: Holding) -> [Arg<'_>; 5] {
        [
            Arg::Text(self.claim.contender.as_str()),
            Arg::Caller(self.caller()),
            match holding {
                Holding::Nothing => Arg::Text("-"),
                Holding::Under(token) => Arg::Number(token.get()),
                _ => Arg::Text("?"),
            },
            Arg::Number(self.place),
            Arg::Number(u64::from(self.shared.route.is_standalone())),
        ]
    }

    /// What the script says.
    fn understand(&mut self, reply: &Reply) -> Result<Answer> {
        let token = match reply {
            Reply::Int(token) => Some(*token),
            reply => reply.text().and_then(|token| token.parse().ok()),
        };
        if let Some(token) = token {
            return Ok(self.ours(token));
        }
        let parts = reply.array().unwrap_or_default();
        let int = |at: usize| parts.get(at).and_then(Reply::int);
        match (int(0), int(1)) {
            (Some(1), Some(token)) => Ok(self.ours(token)),
            (Some(0), Some(place)) => {
                self.place = place.unsigned_abs();
                ownership(&parts[2..], &self.claim).map(Answer::Held)
            }
            (Some(2), Some(place)) => {
                self.place = place.unsigned_abs();
                self.promised = Duration::from_millis(int(2).map_or(0, i64::unsigned_abs));
                Ok(Answer::Vacant)
            }
            _ => Err(error::unexpected("a contender")),
        }
    }

    fn ours(&self, token: i64) -> Answer {
        let lease = self.claim.lease.total().saturating_sub(ROUNDING);
        Answer::Ours(Ownership::new(self.claim.contender.clone(), FencingToken::from_store(token), lease))
    }

    /// Makes sure that enough replicas have what was taken, or gives it back.
    async fn replicate(&mut self, pipe: &Pipe, wait: WaitReplicas, token: FencingToken) -> Result<()> {
        let (count, limit) = (wait.count.to_string(), wait.timeout.as_millis().to_string());
        let command = crate::resp::command(&["WAIT", &count, &limit]);
        // On the connection of the acquisition: the server waits for what came over this one.
        let reply = pipe.wait_for_replicas(&command).await?;
        let reached = match &reply {
            Reply::Int(reached) => *reached,
            Reply::Error(words) => return Err(error::refused(words)),
            _ => return Err(error::unexpected("WAIT")),
        };
        if reached >= i64::from(wait.count) {
            return Ok(());
        }
        self.release(Holding::Under(token)).await?;
        let message = format!(
            "only {reached} of {count} replicas had the acquisition within {:?}: it was given back",
            wait.timeout
        );
        Err(error::new(ErrorKind::Unavailable, message))
    }

    fn channels(&self) -> Vec<Channel> {
        let key = key(&self.claim.mutex);
        match self.claim.intent {
            Intent::Queue => vec![format!("{key}:{}", self.claim.contender).into()],
            _ => vec![format!("{key}:owner").into(), key.into()],
        }
    }
}

/// Who owns the mutex: `{ms left, token or 0, .., owner}`.
fn ownership(parts: &[Reply], claim: &Claim) -> Result<Ownership> {
    let (Some(left), Some(token), Some(owner)) =
        (parts.first().and_then(Reply::int), parts.get(1).and_then(Reply::int), parts.last())
    else {
        return Err(error::unexpected("who holds a mutex"));
    };
    let owner = owner.text().and_then(|owner| ContenderId::foreign(owner).ok());
    let owner = owner.ok_or_else(|| error::foreign(&key(&claim.mutex)))?;
    Ok(Ownership::new(owner, FencingToken::from_store(token), remaining(left, &claim.lease, claim)))
}

/// A key without an end keeps everyone out for good: it is looked at now and then.
fn remaining(left: i64, lease: &Lease, claim: &Claim) -> Duration {
    match u64::try_from(left) {
        Ok(left) => Duration::from_millis(left),
        Err(_) => {
            let key = key(&claim.mutex);
            tracing::warn!(%key, "the key has no expiry, so no lease ever ends: remove it");
            lease.total().max(Duration::from_secs(1))
        }
    }
}

fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A token as the scripts tell it: 0 for none.
pub(crate) trait FromStore {
    fn from_store(token: i64) -> Option<FencingToken>;
}

impl FromStore for FencingToken {
    fn from_store(token: i64) -> Option<FencingToken> {
        u64::try_from(token).ok().filter(|token| *token > 0).map(Self::new)
    }
}

#[async_trait]
impl Session for RedisSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        // From here on, whatever becomes of the reply.
        self.queued |= self.claim.intent == Intent::Queue;
        let (mut answer, mut pipe) = self.look(prior).await?;
        // Who held it is to know at once that it does not any more.
        if prior != Prior::Held && self.enters(&answer) {
            self.hear().await;
            (answer, pipe) = self.look(prior).await?;
        }
        if prior != Prior::Held && self.entered {
            (answer, pipe) = self.pass_the_dead(prior, answer, pipe).await?;
        }
        self.holds = matches!(answer, Answer::Ours(_));
        if let Answer::Ours(ours) = &answer {
            self.waited = self.place > 0 || self.waited && prior == Prior::Held;
            self.left = false;
            // Its lease ends a hold; nothing that is published tells a holder more.
            (self.queued, self.ears, self.listens) = (false, None, false);
            (self.place, self.entered) = (0, false);
            // A renewal is never given back: its holder is at work.
            if let (Some(wait), Some(token)) = (self.shared.context.settings.wait, ours.token)
                && prior != Prior::Held
            {
                self.replicate(&pipe, wait, token).await?;
            }
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let told = Arg::Number(u64::from(self.claim.intent == Intent::Observe));
        let args = [Arg::Text("0"), told];
        let call = Invocation::new(Script::Look, &self.claim.mutex, &args);
        let (reply, _) = self.shared.route.invoke(&call).await?;
        match reply.array() {
            Some([_]) => Ok(None),
            Some([_, seen @ ..]) => ownership(seen, &self.claim).map(Some),
            _ => Err(error::unexpected("a look")),
        }
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        // One that was not answered is made by itself the next time: a shared one frees nothing that others wait for.
        let shares = self.place == 0 && !self.waited && !std::mem::replace(&mut self.left, true);
        let usual = match holding {
            Holding::Under(token) if shares => Some(Usual::Leave(self.caller(), token)),
            _ => None,
        };
        let args = self.leaving(holding);
        let call = Invocation::new(Script::Release, &self.claim.mutex, &args);
        self.shared.route.invoke(&Invocation { usual, ..call }).await?;
        (self.queued, self.place, self.entered, self.left) = (false, 0, false, false);
        Ok(())
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        // Boxed: a holder waits here all the time, and needs none of it.
        Box::pin(self.rung()).await;
        Ok(())
    }
}

impl Drop for RedisSession {
    fn drop(&mut self) {
        if self.queued {
            let args = self.leaving(Holding::Nothing);
            self.shared.route.send(&Invocation::new(Script::Release, &self.claim.mutex, &args));
        }
    }
}
