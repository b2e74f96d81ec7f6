//! One contender or observer at the store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use simba_core::{
    Answer, Claim, ContenderId, FencingToken, Holding, Intent, Moment, Ownership, Prior, Result, Session,
};

use crate::client::{Client, Failure, Sight, TxnResponse, Watch};
use crate::error::{failed, restless, stranger};
use crate::keys::end_of;
use crate::place::Place;
use crate::queue::{self, Head, Standing, revision_of};
use crate::tenancy::Tenancy;

/// How often a queue that changes under the look is looked at again.
const LOOKS: usize = 8;

/// A process may hold thousands of mutexes: what only those who wait need is boxed.
pub(crate) struct EtcdSession {
    tenancy: Arc<Tenancy>,
    /// What all keys of the mutex begin with.
    prefix: String,
    contender: ContenderId,
    intent: Intent,
    place: Option<Place>,
    /// Our key is the first: it stays so for as long as it is there.
    leads: bool,
    /// Another session under our id holds the mutex: we take no place behind it.
    twin: bool,
    /// The first hint was given.
    told: bool,
    /// Rings when our key goes.
    own: Option<Watch>,
    /// Rings when it may be our turn, or when there is something new to look at.
    turn: Option<Box<Turn>>,
    /// What the last look saw, for those who only look.
    seen: Option<Box<Seen>>,
}

/// What is watched for our turn.
struct Turn {
    key: Vec<u8>,
    watch: Watch,
}

/// The first of the queue, if there is one, and when that was so.
struct Seen {
    head: Option<Head>,
    at: i64,
}

impl EtcdSession {
    pub(crate) fn new(tenancy: Arc<Tenancy>, prefix: String, claim: Claim) -> Self {
        Self {
            tenancy,
            prefix,
            contender: claim.contender,
            intent: claim.intent,
            place: None,
            leads: false,
            twin: false,
            told: false,
            own: None,
            turn: None,
            seen: None,
        }
    }

    fn client(&self) -> &Arc<Client> {
        self.tenancy.client()
    }

    /// Takes note that the mutex is ours for so long, counted from before this call.
    fn ours(&mut self, revision: i64, remaining: Duration) -> Answer {
        self.leads = true;
        (self.turn, self.seen) = (None, None);
        let token = queue::token(revision);
        Answer::Ours(Ownership::new(self.contender.clone(), Some(token), remaining))
    }

    /// Nobody knows how much of its lease another has left; its length is taken for ours.
    fn seen(&self, head: &Head) -> Ownership {
        Ownership::new(head.owner.clone(), Some(head.token), self.tenancy.length())
    }

    fn held(&self, head: &Head) -> Answer {
        Answer::Held(self.seen(head))
    }

    /// Our key is gone, and whatever stood there is not ours any more.
    fn gone(&mut self) {
        if let Some(place) = self.place.take_if(|place| place.is_unsure()) {
            // A request that was not answered may make it once more.
            place.forget(&self.tenancy);
        }
        (self.place, self.own, self.leads) = (None, None, false);
    }

    // ===== contending =====

    /// Leaves the queue if the entry is that of a lost tenure.
    ///
    /// Its lease may still live, but an entry that led again would give the next tenure the token of the lost one.
    async fn give_up_lost(&mut self, lost: FencingToken) -> Result<()> {
        let revision = self.place.as_ref().and_then(|place| place.revision);
        let Some(revision) = revision.filter(|revision| queue::token(*revision) == lost) else {
            return Ok(());
        };
        // Renewals share a call: after an outage most entries are found gone, and are not deleted one by one.
        if self.renew(revision).await?.is_some() {
            self.leave().await?;
        }
        Ok(())
    }

    async fn ask(&mut self, prior: Prior) -> Result<Answer> {
        let began = self.client().now();
        if let Some(place) = self.place.take_if(|place| place.is_left) {
            // A request to delete it may be carried out at any time, and must not meet what is ours by then.
            place.forget(&self.tenancy);
        }
        for _ in 0..LOOKS {
            let answer = match self.place.as_ref().and_then(|place| place.revision) {
                Some(revision) if self.leads => self.renew(revision).await?,
                Some(revision) => self.look(revision, prior, began).await?,
                None => self.join(prior, began).await?,
            };
            if let Some(answer) = answer {
                return Ok(answer);
            }
        }
        Err(restless())
    }

    /// Shows by a quorum that our key is there and its lease alive. Nothing if it is not.
    async fn renew(&mut self, revision: i64) -> Result<Option<Answer>> {
        let Some(place) = &mut self.place else { return Ok(None) };
        let checked = self.tenancy.check(&place.life, &place.key, revision).await;
        match checked.map_err(|failure| failed("renew", failure))? {
            Some(checked) => {
                place.seen_at = checked.at;
                Ok(Some(self.ours(revision, checked.remaining)))
            }
            None => {
                self.gone();
                Ok(None)
            }
        }
    }

    /// Takes a place in the queue, and the mutex if it is the first.
    async fn join(&mut self, prior: Prior, began: Moment) -> Result<Option<Answer>> {
        if self.twin {
            match self.first().await? {
                Some(head) if head.owner == self.contender => return Ok(Some(self.held(&head))),
                _ => self.twin = false,
            }
        }
        let Some(answer) = self.joined().await? else { return Ok(None) };
        match self.intent {
            Intent::Queue => self.queued(answer, prior, began).await,
            _ => self.tried(answer, began).await,
        }
    }

    /// Asks for a place, or hears what came of the last time that it was asked for. Nothing if the lease has ended.
    async fn joined(&mut self) -> Result<Option<TxnResponse>> {
        let outcome = match &mut self.place {
            Some(place) => place.outcome().await,
            None => None,
        };
        let outcome = match outcome {
            Some(outcome) => outcome,
            None => self.begin().await?,
        };
        match outcome {
            Ok(answer) => Ok(Some(answer)),
            Err(failure) if failure.is_lease_gone() => {
                self.place.take().iter().for_each(|place| self.tenancy.ended(&place.life));
                Ok(None)
            }
            // The next call asks for the same key: it is made once.
            Err(failure) => Err(failed("take a place in the queue", failure)),
        }
    }

    async fn begin(&mut self) -> Result<Result<TxnResponse, Failure>> {
        let life = self.tenancy.life().await?;
        // A key of a lease that has ended since is gone with it.
        let place = match self.place.take_if(|place| Arc::ptr_eq(&place.life, &life)) {
            Some(place) => place,
            None => Place::new(&self.prefix, life, self.client())?,
        };
        let txn = if self.intent == Intent::Queue { queue::join } else { queue::take };
        let txn = txn(&self.prefix, &place.key, &self.contender, place.life.id);
        let begun = self.client().begin(txn);
        let place = self.place.insert(place);
        place.begun(begun);
        Ok(place.outcome().await.unwrap_or(Err(Failure::Closed)))
    }

    /// What follows from an answer to [`queue::join`].
    async fn queued(
        &mut self,
        mut answer: TxnResponse,
        prior: Prior,
        began: Moment,
    ) -> Result<Option<Answer>> {
        let made = revision_of(answer.header.as_ref())?;
        let Some(place) = &mut self.place else { return Ok(None) };
        if answer.succeeded {
            place.made(made);
            let standing = Standing::of_new(&mut answer)?;
            return self.placed(standing, made, prior, began).await;
        }
        // It was made before, by a request whose answer was lost.
        let found = answer.ranges().next().ok_or_else(stranger)?;
        found.iter().for_each(|own| place.made(own.create_revision));
        Ok(None)
    }

    /// What follows from an answer to [`queue::take`].
    async fn tried(&mut self, mut answer: TxnResponse, began: Moment) -> Result<Option<Answer>> {
        let made = revision_of(answer.header.as_ref())?;
        let Some(place) = &mut self.place else { return Ok(None) };
        if answer.succeeded {
            place.made(made);
            return self.placed(Standing::First, made, Prior::Nothing, began).await;
        }
        let found = answer.ranges().next().ok_or_else(stranger)?;
        let Some(first) = found.first() else { return Ok(None) };
        if first.key == place.key.as_bytes() {
            place.made(first.create_revision);
            return Ok(None);
        }
        self.place.take().into_iter().for_each(|place| place.forget(&self.tenancy));
        Ok(Some(self.held(&Head::of(first)?)))
    }

    /// Looks how far our place has come.
    async fn look(&mut self, revision: i64, prior: Prior, began: Moment) -> Result<Option<Answer>> {
        let Some(place) = &self.place else { return Ok(None) };
        if place.life.left(began).is_zero() {
            // After an outage its lease has ended, most likely: many ask that together.
            let checked = self.tenancy.check(&place.life, &place.key, revision).await;
            if checked.map_err(|failure| failed("renew", failure))?.is_none() {
                self.gone();
                return Ok(None);
            }
        }
        let looked = self.client().txn(queue::look(&self.prefix, &place.key, revision)).await;
        let answer = looked.map_err(|failure| failed("look at the queue", failure))?;
        let standing = Standing::of(answer, revision)?;
        self.placed(standing, revision, prior, began).await
    }

    /// What follows from our place in the queue.
    ///
    /// Who is first stays first for as long as its lease lives. If that was shown lately, what it left is given here,
    /// counted from then; if not, it is renewed first.
    async fn placed(
        &mut self,
        standing: Standing,
        revision: i64,
        prior: Prior,
        began: Moment,
    ) -> Result<Option<Answer>> {
        match (standing, &self.place) {
            (Standing::First, Some(place)) => {
                let left = place.life.left(began);
                if left >= place.life.ttl() / 2 {
                    return Ok(Some(self.ours(revision, left)));
                }
                self.renew(revision).await
            }
            (Standing::Behind { first, next, at }, Some(_)) => self.behind(first, next, at, prior).await,
            _ => {
                self.gone();
                Ok(None)
            }
        }
    }

    /// It is somebody else's: keeps or gives up our place.
    async fn behind(&mut self, first: Head, next: Vec<u8>, at: i64, prior: Prior) -> Result<Option<Answer>> {
        let twin = first.owner == self.contender && prior == Prior::Nothing;
        if self.intent != Intent::Queue || twin {
            self.twin = twin;
            self.leave().await?;
            return Ok(Some(self.held(&first)));
        }
        if self.turn.as_ref().is_none_or(|turn| turn.key != next) {
            // From right after the look: nothing is missed.
            let has_time = next != first.key;
            let watch = self.client().watch(Sight::end_of(&next, at + 1), has_time);
            self.turn = Some(Box::new(Turn { key: next, watch }));
        }
        Ok(Some(self.held(&first)))
    }

    /// Gives the place up.
    async fn leave(&mut self) -> Result<()> {
        let Some(place) = &mut self.place else { return Ok(()) };
        place.outcome().await;
        (place.is_left, self.leads) = (true, false);
        let deleted = self.tenancy.client().delete(&place.key).await;
        deleted.map_err(|failure| failed("leave the queue", failure))?;
        if let Some(place) = self.place.take_if(|place| place.is_unsure()) {
            place.forget(&self.tenancy);
        }
        self.gone();
        self.turn = None;
        Ok(())
    }

    // ===== looking =====

    /// Who holds the mutex.
    async fn first(&mut self) -> Result<Option<Head>> {
        let looked = self.client().range(queue::first(&self.prefix)).await;
        let answer = looked.map_err(|failure| failed("look at the queue", failure))?;
        let head = answer.kvs.first().map(Head::of).transpose()?;
        let at = revision_of(answer.header.as_ref())?;
        self.seen = Some(Box::new(Seen { head: head.clone(), at }));
        Ok(head)
    }

    /// Watches where the owner changes next, from right after the last look.
    fn arm(&mut self) {
        let Some(seen) = &self.seen else { return };
        let sight = match &seen.head {
            Some(head) => Sight::end_of(&head.key, seen.at + 1),
            None => Sight::arrival(&self.prefix, end_of(&self.prefix), seen.at + 1),
        };
        let watch = self.client().watch(sight, true);
        self.turn = Some(Box::new(Turn { key: Vec::new(), watch }));
    }

    // ===== hints =====

    /// Waits for signs that our key is gone.
    async fn until_gone(&mut self) -> Result<()> {
        loop {
            let Some(place) = &mut self.place else { return Ok(()) };
            let Some(revision) = place.revision else { return Ok(()) };
            let sight = || Sight::end_of(place.key.as_bytes(), place.seen_at + 1);
            let own = self.own.get_or_insert_with(|| self.tenancy.client().watch_later(sight()));
            own.rung().await;
            // Boxed: seldom, and what waits has to be small.
            let checked = Box::pin(self.tenancy.check(&place.life, &place.key, revision)).await;
            match checked {
                Ok(None) => return Ok(()),
                Ok(Some(checked)) => place.seen_at = checked.at,
                // Who cannot tell hears of the next connection.
                Err(_) => {}
            }
            self.own = None;
        }
    }

    async fn until_turn(&mut self) -> Result<()> {
        if self.intent != Intent::Queue && self.turn.is_none() {
            self.arm();
        }
        if !self.told {
            self.told = true;
            return Ok(());
        }
        let idle = || Box::new(Turn { key: Vec::new(), watch: self.tenancy.client().watch_the_connection() });
        self.turn.get_or_insert_with(idle).watch.rung().await;
        self.turn = None;
        Ok(())
    }
}

#[async_trait]
impl Session for EtcdSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        if let Prior::Lapsed(lost) = prior {
            Box::pin(self.give_up_lost(lost)).await?;
        }
        // Of renewals thousands are under way at once: they alone are not boxed, and small.
        if let (true, Some(revision)) = (self.leads, self.place.as_ref().and_then(|place| place.revision))
            && let Some(answer) = self.renew(revision).await?
        {
            return Ok(answer);
        }
        Box::pin(self.ask(prior)).await
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let head = self.first().await?;
        Ok(head.map(|head| self.seen(&head)))
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        let revision = self.place.as_ref().and_then(|place| place.revision);
        if let (Holding::Under(token), Some(revision), true) = (holding, revision, self.leads)
            && queue::token(revision) != token
        {
            return Ok(());
        }
        self.leave().await
    }

    async fn changed(&mut self) -> Result<()> {
        if self.leads {
            return self.until_gone().await;
        }
        Box::pin(self.until_turn()).await
    }
}

impl Drop for EtcdSession {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            place.forget(&self.tenancy);
        }
    }
}
