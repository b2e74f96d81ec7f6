//! Session of one contender or observer.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use simba_core::spi::{Answer, Claim, Holding, Intent, Ownership, Prior, Session, Subscription, within};
use simba_core::{ContenderId, ErrorKind, FencingToken, MutexName, Result};

use crate::backend::Shared;
use crate::config::WaitReplicas;
use crate::error;
use crate::pipeline::Pipeline;
use crate::resp::Reply;
use crate::scripts::{Arg, Caller, FastPath, Invocation, Script, key};
use crate::supervisor::Via;
use crate::wakeups::Channel;

/// Longest wait for the confirmation of a subscription. After it, a waiter enters the queue unsubscribed.
const SUBSCRIBE_LIMIT: Duration = Duration::from_millis(500);
/// Longest time that one `contend` spends on removing dead waiters from the queue.
const SKIP_LIMIT: Duration = Duration::from_secs(2);
/// Rounding error of a lease: Redis counts in whole milliseconds and truncates the current one.
const ROUNDING: Duration = Duration::from_millis(1);

pub(crate) struct RedisSession {
    shared: Arc<Shared>,
    claim: Claim,
    /// See [`Caller`].
    nonce: u64,
    place: Place,
    holds: bool,
    /// Whether the current hold was waited for. Other waiters are then likely.
    waited: bool,
    /// A release is in flight, or got no reply.
    releasing: bool,
    /// The connection of a call that got no reply. The server may not have executed it yet.
    unanswered: Option<Via>,
    /// How many milliseconds the last call reserved the mutex for another waiter that is probably dead.
    reserved_ms: u64,
}

/// Place of a waiter in the queue. The default is that of a session that does not wait.
#[derive(Default)]
struct Place {
    /// Server time of the first refused call, in microseconds. 0 before that call.
    position: u64,
    /// Whether the server has confirmed that this session is in the queue.
    entered: bool,
    /// Whether the queue may hold an entry of this session.
    may_be_queued: bool,
    subscriptions: Option<Box<[Subscription<Channel>]>>,
    /// Whether the server has confirmed the subscription.
    subscribed: bool,
}

impl RedisSession {
    pub(crate) fn new(shared: Arc<Shared>, claim: Claim) -> Self {
        let (nonce, place, reserved_ms) = (fastrand::u64(..), Place::default(), 0);
        let (holds, waited, releasing, unanswered) = (false, false, false, None);
        Self { shared, claim, nonce, place, holds, waited, releasing, unanswered, reserved_ms }
    }

    /// Returns the connection for a call that acquires, or for a renewal.
    fn via(&self, prior: Prior) -> Via {
        match self.shared.context.settings.wait {
            Some(_) if prior != Prior::Held => Via::Acquisitions,
            _ => Via::Main,
        }
    }

    /// Makes sure that the server executes the next call, on this connection, after an unanswered one: otherwise a
    /// release could overtake the acquisition that it has to undo.
    async fn after_unanswered(&mut self, next: Via) -> Result<()> {
        if let Some(via) = self.unanswered.filter(|last| *last != next) {
            let args = [Arg::Text("0"), Arg::Text("0")];
            let inspect = Invocation { via, ..Invocation::new(Script::Inspect, &self.claim.mutex, &args) };
            self.shared.route.invoke(&inspect).await?;
        }
        self.unanswered = Some(next);
        Ok(())
    }

    /// Calls `contend.lua` once.
    async fn call_contend(&self, prior: Prior) -> Result<(Reply, Pipeline)> {
        let lease = &self.claim.lease;
        let lifetime = whole_millis((lease.poll() * 2).max(lease.ttl()));
        let (caller, total) = (self.caller(), whole_millis(lease.total()));
        let standalone = u8::from(self.shared.route.is_standalone());
        let (position, subscribed) = (self.place.position, u8::from(self.place.subscribed));
        let queue_entry = format!("{} {standalone} {position} {lifetime} {subscribed}", self.intent());
        let args = [
            Arg::Text(self.claim.contender.as_str()),
            Arg::Caller(caller),
            Arg::Number(total),
            match prior {
                Prior::Nothing if self.place.position == 0 => Arg::Text("nothing"),
                Prior::Nothing => Arg::Text("position"),
                // A renewal does not wait for replicas, so it must not acquire.
                Prior::Held if self.shared.context.settings.wait.is_some() => Arg::Text("renew"),
                Prior::Held => Arg::Text("held"),
                Prior::Lapsed(token) => Arg::Number(token.get()),
                _ => Arg::Text("unknown"),
            },
            Arg::Text(&queue_entry),
        ];
        let fast_path = match prior {
            Prior::Nothing if self.place.position == 0 => Some(FastPath::Acquire(caller, total)),
            // A batch runs renewals before releases: this one would overtake our own release.
            Prior::Held if !self.releasing => Some(FastPath::Renew(caller, total)),
            _ => None,
        };
        let call = Invocation::new(Script::Contend, &self.claim.mutex, &args);
        self.shared.route.invoke(&Invocation { fast_path, via: self.via(prior), ..call }).await
    }

    /// Returns the intent for `contend.lua`.
    fn intent(&self) -> &'static str {
        match self.claim.intent {
            Intent::Queue if self.place.position == 0 => "first",
            Intent::Queue if !self.place.entered => "enter",
            Intent::Queue => "queued",
            _ => "try",
        }
    }

    /// Calls `contend.lua` once and parses the reply.
    async fn contend_once(&mut self, prior: Prior) -> Result<(Answer, Pipeline)> {
        let enters = self.place.position > 0;
        self.after_unanswered(self.via(prior)).await?;
        let (reply, pipeline) = self.call_contend(prior).await?;
        self.unanswered = None;
        let answer = self.parse_answer(&reply)?;
        self.place.entered = enters;
        Ok((answer, pipeline))
    }

    /// Returns whether the session has a position but no entry in the queue, and another contender comes first.
    fn must_enter_queue(&self, answer: &Answer) -> bool {
        let refused = match answer {
            Answer::Ours(_) => false,
            Answer::Held(seen) => seen.owner != self.claim.contender,
            Answer::Vacant => true,
        };
        refused && self.place.position > 0 && !self.place.entered
    }

    /// Repeats the call as long as it reserves the mutex for a waiter that is probably dead. Each call removes one such
    /// waiter. Without the loop, a hundred dead waiters would cost a hundred pauses of the engine, each longer than the
    /// last.
    async fn skip_dead_waiters(
        &mut self,
        prior: Prior,
        first: Answer,
        pipeline: Pipeline,
    ) -> Result<(Answer, Pipeline)> {
        let clock = Arc::clone(&self.shared.context.clock);
        let end = clock.now() + SKIP_LIMIT.min(self.claim.lease.ttl() / 6);
        let mut last = (first, pipeline);
        loop {
            let reserved_for = Duration::from_millis(std::mem::take(&mut self.reserved_ms));
            if !matches!(last.0, Answer::Vacant) || reserved_for.is_zero() || clock.now() >= end {
                return Ok(last);
            }
            clock.sleep_until(clock.now() + reserved_for).await;
            last = self.contend_once(prior).await?;
        }
    }

    /// Waits for the subscription before the session enters the queue, so that messages reach every waiter in it. A
    /// waiter that dies before it has subscribed delays no other. Gives up after [`SUBSCRIBE_LIMIT`].
    async fn subscribe_before_queueing(&mut self) {
        if self.place.subscribed {
            return;
        }
        let limit = SUBSCRIBE_LIMIT.min(self.claim.lease.ttl() / 20);
        let clock = Arc::clone(&self.shared.context.clock);
        if within(&*clock, limit, self.notified()).await.is_some() {
            // `changed` must also complete for the confirmation, which `notified` has just consumed.
            self.place.subscriptions.iter().flatten().for_each(Subscription::notify);
        }
    }

    /// Waits for a message. The first one is the confirmation of the subscription.
    async fn notified(&mut self) {
        if self.place.subscriptions.is_none() {
            let subscribe = |channel| self.shared.subscriptions.subscribe(channel);
            self.place.subscriptions = Some(self.channels().iter().map(subscribe).collect());
        }
        match self.place.subscriptions.as_deref_mut() {
            Some([one, other]) => tokio::select! {
                biased;
                () = one.notified() => {}
                () = other.notified() => {}
            },
            Some([one]) => one.notified().await,
            _ => std::future::pending().await,
        }
        self.place.subscribed = true;
    }

    /// Returns the part of the fence that identifies this session as the holder.
    fn caller(&self) -> Caller<'_> {
        let transition = whole_millis(self.claim.lease.transition());
        Caller { nonce: self.nonce, transition, contender: self.claim.contender.as_str() }
    }

    /// Returns the arguments of `release.lua`.
    fn release_args(&self, holding: Holding) -> [Arg<'_>; 5] {
        [
            Arg::Text(self.claim.contender.as_str()),
            Arg::Caller(self.caller()),
            match holding {
                Holding::Nothing => Arg::Text("nothing"),
                Holding::Under(token) => Arg::Number(token.get()),
                _ => Arg::Text("unknown"),
            },
            Arg::Number(self.place.position),
            Arg::Number(u64::from(self.shared.route.is_standalone())),
        ]
    }

    /// Parses a reply of `contend.lua`.
    fn parse_answer(&mut self, reply: &Reply) -> Result<Answer> {
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
            (Some(0), Some(position)) => {
                self.place.position = position.unsigned_abs();
                ownership(&parts[2..], &self.claim).map(Answer::Held)
            }
            (Some(2), Some(position)) => {
                self.place.position = position.unsigned_abs();
                self.reserved_ms = int(2).map_or(0, i64::unsigned_abs);
                Ok(Answer::Vacant)
            }
            _ => Err(error::unexpected("contend")),
        }
    }

    fn ours(&self, token: i64) -> Answer {
        let lease = self.claim.lease.total().saturating_sub(ROUNDING);
        Answer::Ours(Ownership::new(self.claim.contender.clone(), token_of(token), lease))
    }

    /// Waits until enough replicas have the acquisition. Releases the mutex and fails otherwise.
    async fn replicate(
        &mut self,
        pipeline: &Pipeline,
        wait: WaitReplicas,
        token: FencingToken,
    ) -> Result<()> {
        let (count, limit) = (wait.count.to_string(), wait.timeout.as_millis().to_string());
        // On the connection of the acquisition: `WAIT` covers the writes of its own connection only.
        let reply = pipeline.wait_for_replicas(&["WAIT", &count, &limit]).await?.into_result()?;
        let reached = reply.int().ok_or_else(|| error::unexpected("WAIT"))?;
        if reached >= i64::from(wait.count) {
            return Ok(());
        }
        self.release(Holding::Under(token)).await?;
        let message = format!(
            "only {reached} of {count} replicas had the acquisition within {:?}: it was released again",
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

/// Parses the owner of a mutex from `{ms left, token or 0, .., owner}`.
fn ownership(parts: &[Reply], claim: &Claim) -> Result<Ownership> {
    let int = |at: usize| parts.get(at).and_then(Reply::int);
    let (Some(left), Some(token), Some(owner)) = (int(0), int(1), parts.last()) else {
        return Err(error::unexpected("a query of the holder"));
    };
    let owner = contender(&claim.mutex, owner)?;
    let left = u64::try_from(left).map(Duration::from_millis).unwrap_or_else(|_| {
        // It blocks the mutex for good, so it is polled.
        let key = key(&claim.mutex);
        tracing::warn!(%key, "redis: the key has no expiry, so its lease never ends. Fix: delete it");
        claim.lease.total().max(Duration::from_secs(1))
    });
    Ok(Ownership::new(owner, token_of(token), left))
}

fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the token in a script's reply, where 0 stands for none.
pub(crate) fn token_of(token: i64) -> Option<FencingToken> {
    u64::try_from(token).ok().filter(|token| *token > 0).map(FencingToken::new)
}

/// Returns the contender id in a script's reply. Fails if the key of the mutex holds another value.
pub(crate) fn contender(mutex: &MutexName, reply: &Reply) -> Result<ContenderId> {
    let id = reply.text().and_then(|id| ContenderId::foreign(id).ok());
    id.ok_or_else(|| error::foreign(&key(mutex)))
}

#[async_trait]
impl Session for RedisSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        // Set before the call: it may enter the queue even if its reply is lost.
        self.place.may_be_queued |= self.claim.intent == Intent::Queue;
        let (mut answer, mut pipeline) = self.contend_once(prior).await?;
        // Not for a holder: it must learn of its loss without delay.
        if prior != Prior::Held && self.must_enter_queue(&answer) {
            self.subscribe_before_queueing().await;
            (answer, pipeline) = self.contend_once(prior).await?;
        }
        if prior != Prior::Held && self.place.entered {
            (answer, pipeline) = self.skip_dead_waiters(prior, answer, pipeline).await?;
        }
        self.holds = matches!(answer, Answer::Ours(_));
        if let Answer::Ours(ours) = &answer {
            self.waited = self.place.position > 0 || self.waited && prior == Prior::Held;
            self.releasing = false;
            // A holder needs no messages: only its lease ends the hold.
            self.place = Place::default();
            // A renewal is never released: the holder's work is running.
            if let (Some(wait), Some(token)) = (self.shared.context.settings.wait, ours.token)
                && prior != Prior::Held
            {
                self.replicate(&pipeline, wait, token).await?;
            }
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let notify_on_release = Arg::Number(u64::from(self.claim.intent == Intent::Observe));
        let args = [Arg::Text("0"), notify_on_release];
        let call = Invocation::new(Script::Inspect, &self.claim.mutex, &args);
        let (reply, _) = self.shared.route.invoke(&call).await?;
        match reply.array() {
            Some([_]) => Ok(None),
            Some([_, seen @ ..]) => ownership(seen, &self.claim).map(Some),
            _ => Err(error::unexpected("inspect")),
        }
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        // A release without a reply is repeated as a single call: a batch leaves mutexes with waiters alone.
        let batches =
            self.place.position == 0 && !self.waited && !std::mem::replace(&mut self.releasing, true);
        let via = *self.unanswered.get_or_insert(Via::Main);
        let fast_path = match holding {
            Holding::Under(token) if batches => Some(FastPath::Release(self.caller(), token)),
            _ => None,
        };
        let args = self.release_args(holding);
        let call = Invocation::new(Script::Release, &self.claim.mutex, &args);
        self.shared.route.invoke(&Invocation { fast_path, via, ..call }).await?;
        self.unanswered = None;
        (self.place, self.releasing) = (Place::default(), false);
        Ok(())
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        // Boxed: a holder waits here for its whole tenure and does not need this state.
        Box::pin(self.notified()).await;
        Ok(())
    }
}

impl Drop for RedisSession {
    fn drop(&mut self) {
        if self.place.may_be_queued {
            let args = self.release_args(Holding::Nothing);
            let via = self.unanswered.unwrap_or(Via::Main);
            let call = Invocation::new(Script::Release, &self.claim.mutex, &args);
            self.shared.route.send(&Invocation { via, ..call });
        }
    }
}
