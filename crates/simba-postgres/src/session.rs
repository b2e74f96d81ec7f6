//! One contender or observer at the server.

use std::sync::Arc;

use simba_core::{
    Answer, Claim, FencingToken, Holding, Intent, Listener, Moment, MutexName, Ownership, Prior, Result,
    Session, async_trait,
};
use tokio_postgres::Row;

use crate::desk::{Desk, Numbers, Wish};
use crate::errands::{self, Errand};
use crate::error::protocol;
use crate::handle::{Handle, Hints};
use crate::rows::{Seen, get, left, token};
use crate::statements::Query;

/// How often a mutex that was free a moment ago is tried within one call.
const TRIES: u32 = 3;

/// How long a new entry in the queue lasts of a handle whose subscription takes long: nothing shows yet that it lives.
/// Without a subscription the entry is renewed after half of this time, and then lasts as long as any other.
const PROVISIONAL: std::time::Duration = std::time::Duration::from_secs(2);

/// A parameter that no token has.
const NO_TOKEN: i64 = -1;

pub(crate) struct PostgresSession {
    handle: Arc<Handle>,
    claim: Claim,
    /// Tells this session from all others of the handle, also from those that share its contender's id.
    number: u64,
    /// The queue may have an entry of ours.
    queued: bool,
    /// When an entry that lasts for [`PROVISIONAL`] is to be renewed.
    provisional: Option<Moment>,
    /// Under which token it was last ours.
    token: i64,
    holds: bool,
    /// Boxed: a holder has none.
    ear: Option<Box<Ear>>,
}

/// What a session listens to.
struct Ear {
    topic: Topic,
    /// It was told once that it is subscribed.
    told: bool,
}

enum Topic {
    /// That it is our turn.
    Turn(Listener<u64>),
    /// That the owner changed.
    Owner(Listener<MutexName>),
}

impl PostgresSession {
    pub(crate) fn new(handle: Arc<Handle>, claim: Claim) -> Self {
        let number = handle.number();
        Self {
            handle,
            claim,
            number,
            queued: false,
            provisional: None,
            token: NO_TOKEN,
            holds: false,
            ear: None,
        }
    }

    /// Its name in the tables. Made when it is needed: whoever holds many mutexes keeps none of them.
    fn session(&self) -> Arc<str> {
        self.handle.session(self.number).into()
    }

    async fn ask(&mut self, prior: Prior) -> Result<Answer> {
        if prior == Prior::Held {
            return self.renew().await;
        }
        let lapsed = match prior {
            Prior::Lapsed(token) => i64::try_from(token.get()).unwrap_or(NO_TOKEN),
            _ => NO_TOKEN,
        };
        for _ in 0..TRIES {
            let answer = match self.queued {
                true => self.look(lapsed).await?,
                // What we may have must not be missed.
                false => self.take(lapsed, prior != Prior::Nothing).await?,
            };
            if let Some(answer) = answer {
                return Ok(answer);
            }
        }
        // Free whenever we asked, and gone whenever we reached for it.
        Ok(Answer::Vacant)
    }

    /// Renews the mutex, or asks who has it. It never takes it: this call may arrive after the release that followed
    /// it.
    async fn renew(&mut self) -> Result<Answer> {
        let wish = Wish { takes: false, ..self.wish(NO_TOKEN) };
        if let Some(numbers) = self.put(&self.handle.takes, wish, true).await? {
            return self.taken(numbers);
        }
        let rows = self.rows(Query::Inspect, &[&self.claim.mutex.as_str()]).await?;
        rows.first().map_or(Ok(Answer::Vacant), |row| answer(&Seen::of(row)?))
    }

    /// Takes or renews the mutex, or asks who has it. Nothing if it was free in between.
    async fn take(&mut self, lapsed: i64, surely: bool) -> Result<Option<Answer>> {
        if let Some(numbers) = self.put(&self.handle.takes, self.wish(lapsed), surely).await? {
            return self.taken(numbers).map(Some);
        }
        if self.claim.intent != Intent::Queue {
            return self.see(lapsed).await;
        }
        if !self.handle.is_subscribed() {
            // A mutex that nobody ever used is taken without a subscription.
            if let Some(answer) = self.create().await? {
                return Ok(Some(answer));
            }
        }
        self.queue().await
    }

    /// The mutex is ours, by the numbers of its row.
    fn taken(&mut self, [token, watched, ..]: Numbers) -> Result<Answer> {
        self.took(token, watched);
        let token = u64::try_from(token).map_err(|_| protocol("a token is below zero: it is not ours"))?;
        Ok(self.ours(FencingToken::new(token)))
    }

    fn wish(&self, token: i64) -> Wish {
        let (ttl, total) = self.terms();
        let (mutex, owner) = (self.claim.mutex.clone(), self.claim.contender.clone());
        Wish { mutex, owner, session: self.session(), ttl, total, token, takes: true }
    }

    /// Asks at a desk. One that must not be missed is asked for again by itself: a row that is locked at the
    /// moment is left out there.
    async fn put(&self, desk: &Desk, wish: Wish, surely: bool) -> Result<Option<Numbers>> {
        let numbers = desk.ask(&self.handle, wish, surely).await;
        numbers.map_err(|error| error.with_mutex(&self.claim.mutex))
    }

    /// Takes the mutex if it is our turn; else keeps our place, if that is due.
    async fn look(&mut self, lapsed: i64) -> Result<Option<Answer>> {
        let (ttl, total) = self.terms();
        let (mutex, owner) = (self.claim.mutex.as_str(), self.claim.contender.as_str());
        let rows =
            self.rows(Query::Look, &[&mutex, &owner, &&*self.session(), &ttl, &total, &lapsed]).await?;
        let queues = self.claim.intent == Intent::Queue;
        let row = match rows.first() {
            Some(row) => row,
            None if queues => return self.queue().await,
            None => return Ok(None),
        };
        let seen = Seen::of(row)?;
        if let Some(watched) = get(row, 6)? {
            self.queued = false;
            self.took(get(row, 2)?, watched);
            return Ok(Some(Answer::Ours(seen.ownership()?)));
        }
        if seen.session == &*self.session() && !seen.is_free() {
            // It was ours a moment ago, and was taken from us meanwhile: a fresh look tells by whom.
            return Ok(None);
        }
        let (now, place, channel): (_, Option<_>, Option<&str>) = (get(row, 4)?, get(row, 5)?, get(row, 7)?);
        match place.map(|until| left(until, now)) {
            Some(left) if left > self.entry() / 2 && channel == Some(self.handle.calls()) => {
                answer(&seen).map(Some)
            }
            _ if queues => self.queue().await,
            _ => answer(&seen).map(Some),
        }
    }

    /// Keeps our place in the queue, or takes a mutex that nobody ever used. Nothing if it is free: our turn
    /// may have come.
    async fn queue(&mut self) -> Result<Option<Answer>> {
        // A new entry waits for the subscription, so that others see from the beginning whether this process lives. An
        // entry that is there already may be one that others pass over: it is renewed at once.
        let subscribed = self.queued || self.handle.subscribed(self.claim.lease.ttl() / 6).await;
        let before = std::mem::replace(&mut self.queued, true);
        let (ttl, total) = self.terms();
        let (mutex, owner) = (self.claim.mutex.as_str(), self.claim.contender.as_str());
        self.provisional = (!subscribed).then(|| self.handle.clock.now() + PROVISIONAL / 2);
        let entry = if subscribed { self.entry() } else { self.entry().min(PROVISIONAL) };
        let (channel, entry) = (self.handle.calls(), entry.as_secs_f64());
        let params: [crate::wire::Param<'_>; 7] =
            [&mutex, &owner, &&*self.session(), &ttl, &total, &channel, &entry];
        let rows = self.rows(Query::Queue, &params).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let seen = Seen::of(row)?;
        if seen.is_free() {
            return Ok(None);
        }
        let ownership = seen.ownership()?;
        if ownership.owner == self.claim.contender {
            // Ours or a twin's: it got us no place.
            self.queued = before;
        }
        let ours = seen.session == &*self.session();
        Ok(Some(if ours { Answer::Ours(ownership) } else { Answer::Held(ownership) }))
    }

    /// Asks who has the mutex; makes it and takes it if nobody ever used it.
    async fn see(&mut self, lapsed: i64) -> Result<Option<Answer>> {
        let mutex = self.claim.mutex.as_str();
        let rows = self.rows(Query::Inspect, &[&mutex]).await?;
        if let Some(row) = rows.first() {
            let seen = Seen::of(row)?;
            // Somebody may wait for a free one: only a look at the queue tells.
            return if seen.is_free() { self.look(lapsed).await } else { answer(&seen).map(Some) };
        }
        self.create().await
    }

    /// Makes the mutex and takes it. Nothing if it was used before.
    async fn create(&mut self) -> Result<Option<Answer>> {
        let (mutex, owner) = (self.claim.mutex.as_str(), self.claim.contender.as_str());
        let (ttl, total) = self.terms();
        let rows = self.rows(Query::Create, &[&mutex, &owner, &&*self.session(), &ttl, &total]).await?;
        rows.first().map(|row| Ok(self.ours(token(row, 0)?))).transpose()
    }

    /// Frees what the session has under this token.
    async fn free(&self, token: i64) -> Result<()> {
        let freed = self.put(&self.handle.frees, self.wish(token), true).await?;
        let Some([waited, seen, called, watched]) = freed else { return Ok(()) };
        // The one who was called may have left, or the first one come, while we waited for the row.
        if waited > 0 && (called == 0 || waited != seen) {
            self.errand(Errand::Wake(self.claim.mutex.clone()));
        } else {
            self.tell(watched);
        }
        Ok(())
    }

    /// The mutex is ours under this token: a new one is a change of owner.
    fn took(&mut self, token: i64, watched: i64) {
        if std::mem::replace(&mut self.token, token) != token {
            self.tell(watched);
        }
    }

    /// Has those told who watch the mutex, if anybody may.
    fn tell(&self, watched: i64) {
        if watched > 0 {
            self.errand(Errand::Wake(self.claim.mutex.clone()));
        }
    }

    async fn rows(&self, query: Query, params: &[crate::wire::Param<'_>]) -> Result<Vec<Row>> {
        let rows = self.handle.ask(&self.claim.mutex, query, params).await;
        rows.map_err(|error| error.with_mutex(&self.claim.mutex))
    }

    fn errand(&self, errand: Errand) {
        // A handle that is closed runs none: what is left ends by itself.
        let _ = self.handle.errands.send(errand);
    }

    /// Ours for a whole lease, counted by the server from after the call was made.
    fn ours(&self, token: FencingToken) -> Answer {
        Answer::Ours(Ownership::new(self.claim.contender.clone(), Some(token), self.claim.lease.total()))
    }

    fn terms(&self) -> (f64, f64) {
        (self.claim.lease.ttl().as_secs_f64(), self.claim.lease.total().as_secs_f64())
    }

    /// How long a place in the queue lasts: it outlives two polls.
    fn entry(&self) -> std::time::Duration {
        (self.claim.lease.poll() * 2).max(self.claim.lease.ttl())
    }

    /// Waits for a word about the mutex, the first of which says that there will be more.
    async fn hint(&mut self) -> Result<()> {
        if self.ear.is_none() {
            self.ear = Some(self.listen());
            self.handle.wanted.notify_one();
        }
        let Some(ear) = &mut self.ear else { return Ok(()) };
        if !ear.told {
            let mut hints = self.handle.hints.subscribe();
            let settled = hints.wait_for(|hints| *hints != Hints::Down);
            let is_up = async { settled.await.is_ok_and(|hints| *hints == Hints::Up) };
            let is_up = match self.provisional {
                None => is_up.await,
                Some(end) => tokio::select! {
                    biased;
                    is_up = is_up => is_up,
                    () = self.handle.clock.sleep_until(end) => {
                        // The next call renews the entry before it ends.
                        self.provisional = None;
                        return Ok(());
                    }
                },
            };
            if is_up {
                // What was missed before this line, the next look finds.
                ear.told = true;
                return Ok(());
            }
            self.ear = None;
            if self.provisional.take().is_some() {
                return Ok(());
            }
            return Err(Handle::no_hints());
        }
        match &mut ear.topic {
            Topic::Turn(listener) => listener.rung().await,
            Topic::Owner(listener) => listener.rung().await,
        }
        Ok(())
    }

    fn listen(&self) -> Box<Ear> {
        let topic = match self.claim.intent {
            Intent::Queue => Topic::Turn(self.handle.turns.listen(self.number)),
            _ => Topic::Owner(self.handle.owners.listen(self.claim.mutex.clone())),
        };
        Box::new(Ear { topic, told: false })
    }
}

fn answer(seen: &Seen<'_>) -> Result<Answer> {
    Ok(if seen.is_free() { Answer::Vacant } else { Answer::Held(seen.ownership()?) })
}

#[async_trait]
impl Session for PostgresSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let answer = self.ask(prior).await?;
        self.holds = matches!(answer, Answer::Ours(_));
        if self.holds {
            // A holder has nothing to be told.
            self.ear = None;
        } else if answer == Answer::Vacant && self.queued {
            // The waiter before us may die before it takes the mutex, and nobody would notify us.
            self.handle.recheck(self.number);
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let rows = self.rows(Query::Inspect, &[&self.claim.mutex.as_str()]).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let seen = Seen::of(row)?;
        if seen.is_free() { Ok(None) } else { seen.ownership().map(Some) }
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        match holding {
            Holding::Nothing => {}
            Holding::Unknown => self.free(NO_TOKEN).await?,
            // A token that the table cannot hold is none of its tokens.
            Holding::Under(token) => self.free(i64::try_from(token.get()).unwrap_or(i64::MAX)).await?,
            _ => self.free(NO_TOKEN).await?,
        }
        if self.queued {
            let (handle, mutex) = (&self.handle, &self.claim.mutex);
            if errands::leave(handle, mutex, &self.session())
                .await
                .map_err(|error| error.with_mutex(mutex))?
            {
                self.errand(Errand::Wake(mutex.clone()));
            }
            self.queued = false;
        }
        Ok(())
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        // Boxed: a holder waits here all the time, and needs none of it.
        Box::pin(self.hint()).await
    }
}

impl Drop for PostgresSession {
    fn drop(&mut self) {
        if self.queued {
            let (mutex, session) = (self.claim.mutex.clone(), self.session());
            self.errand(Errand::Leave { mutex, session });
        }
    }
}
