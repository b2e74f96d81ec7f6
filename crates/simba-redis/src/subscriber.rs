//! The one connection that hears what is published, for all sessions.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Demand, Hub, Listener, Moment, Result, within};

use crate::error;
use crate::node::{Context, GOOD, backoff};
use crate::resp::{self, Reply};
use crate::route::Route;
use crate::wire::Wire;

/// The name of a channel.
pub(crate) type Channel = Arc<str>;

/// So that one command neither fills the server's buffers nor keeps it from others.
const CHUNK: usize = 1000;
/// How many looks without a sign of life make a silent connection a broken one.
const SILENT_LOOKS: u32 = 4;
/// How long after `next@@…` a waiter looks: the scripts promise the mutex to the waiter before it for a second.
const AFTER_PROMISE: Duration = Duration::from_millis(1050);
/// How many such looks may be planned; without one, the poll remains.
const MOST_PLANNED: usize = 1 << 16;

/// Who listens, and what the server is known to tell us of.
pub(crate) struct Ears {
    hub: Hub<Channel>,
    confirmed: Mutex<HashSet<Channel>>,
}

impl Ears {
    pub(crate) fn new() -> Self {
        Self { hub: Hub::new(), confirmed: Mutex::default() }
    }

    /// Listens to a channel; rung once as soon as the server is known to tell us of it.
    pub(crate) fn listen(&self, channel: &Channel) -> Listener<Channel> {
        let listener = self.hub.listen(Arc::clone(channel));
        if self.confirmed().contains(channel) {
            listener.ring();
        }
        listener
    }

    fn confirmed(&self) -> MutexGuard<'_, HashSet<Channel>> {
        self.confirmed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hears for the listeners, for ever. Connects when the first one comes.
pub(crate) async fn hear(ears: Arc<Ears>, route: Arc<Route>, context: Arc<Context>) {
    ears.hub.demand().await;
    let mut backoff = backoff();
    loop {
        match route.listen().await {
            Ok(wire) => {
                let began = context.clock.now();
                let cause = tokio::select! {
                    biased;
                    cause = Hearing::new(&ears, &context, wire).run() => cause,
                    () = context.moved.notified() => Err(error::gone()),
                };
                tracing::debug!(cause = ?cause.err().map(|cause| cause.to_string()), "hears nothing any more");
                if context.clock.now() - began >= GOOD {
                    backoff.reset();
                }
            }
            Err(cause) => tracing::debug!(%cause, "cannot listen"),
        }
        ears.confirmed().clear();
        context.pause(&mut backoff).await;
    }
}

/// One connection that hears.
struct Hearing<'a> {
    ears: &'a Ears,
    context: &'a Context,
    wire: Wire,
    /// Something came since the last look.
    heard: bool,
    /// Something is to come.
    waiting: bool,
    /// How many confirmations of a channel are outstanding. A subscription that was cancelled before it was confirmed
    /// is none.
    unconfirmed: HashMap<Channel, u32>,
    /// Who is to look later, and when, in this order.
    planned: VecDeque<(Moment, Channel)>,
}

enum Event {
    Reply(Result<Reply>),
    Demand(Demand<Channel>),
    Look,
    Planned,
}

impl<'a> Hearing<'a> {
    fn new(ears: &'a Ears, context: &'a Context, wire: Wire) -> Self {
        let (unconfirmed, planned) = (HashMap::new(), VecDeque::new());
        Self { ears, context, wire, heard: false, waiting: false, unconfirmed, planned }
    }

    async fn run(mut self) -> Result<()> {
        // Covers all that was wanted so far. What was missed meanwhile, each listener looks up when its
        // channel is confirmed.
        let channels = self.ears.hub.resubscribe();
        self.tell("SUBSCRIBE", &channels).await?;
        let clock = &*self.context.clock;
        let every = self.context.settings.timeout / SILENT_LOOKS;
        let mut look = clock.sleep_until(clock.now() + every);
        let (mut silent, mut idle) = (0, Duration::ZERO);
        let mut planned = None;
        loop {
            if planned.is_none() {
                planned = self.planned.front().map(|(at, _)| clock.sleep_until(*at));
            }
            let event = tokio::select! {
                biased;
                reply = self.wire.reply() => Event::Reply(reply),
                demand = self.ears.hub.demand() => Event::Demand(demand),
                () = &mut look => Event::Look,
                () = when_planned(&mut planned) => Event::Planned,
            };
            match event {
                Event::Reply(reply) => self.heed(&reply?),
                Event::Demand(demand) => self.meet(&demand).await?,
                Event::Planned => {
                    planned = None;
                    self.ring_planned(clock.now());
                }
                Event::Look => {
                    look = clock.sleep_until(clock.now() + every);
                    silent = if self.waiting && !self.heard { silent + 1 } else { 0 };
                    idle = if self.heard || self.waiting { Duration::ZERO } else { idle + every };
                    self.heard = false;
                    if silent >= SILENT_LOOKS {
                        return Err(error::silent(self.context.settings.timeout));
                    }
                    if idle >= self.context.settings.ping {
                        self.send(b"*1\r\n$4\r\nPING\r\n").await?;
                    }
                }
            }
        }
    }

    async fn meet(&mut self, demand: &Demand<Channel>) -> Result<()> {
        {
            let mut confirmed = self.ears.confirmed();
            demand.unsubscribe.iter().for_each(|channel| {
                confirmed.remove(channel);
            });
        }
        self.tell("SUBSCRIBE", &demand.subscribe).await?;
        self.tell("UNSUBSCRIBE", &demand.unsubscribe).await
    }

    async fn tell(&mut self, what: &str, channels: &[Channel]) -> Result<()> {
        for chunk in channels.chunks(CHUNK) {
            for channel in chunk {
                *self.unconfirmed.entry(Arc::clone(channel)).or_default() += 1;
            }
            let words: Vec<&str> =
                std::iter::once(what).chain(chunk.iter().map(|channel| &**channel)).collect();
            self.send(&resp::command(&words)).await?;
        }
        Ok(())
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        let limit = self.context.settings.timeout;
        self.waiting = true;
        within(&*self.context.clock, limit, self.wire.send(bytes))
            .await
            .unwrap_or_else(|| Err(error::silent(limit)))
    }

    fn ring_planned(&mut self, now: Moment) {
        while self.planned.front().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, channel)) = self.planned.pop_front() {
                self.ears.hub.ring(&channel);
            }
        }
    }

    fn heed(&mut self, reply: &Reply) {
        self.heard = true;
        self.waiting = false;
        match Heard::of(reply) {
            Heard::Subscribed(channel) => {
                if confirm(&mut self.unconfirmed, channel) {
                    let channel: Channel = channel.into();
                    self.ears.confirmed().insert(Arc::clone(&channel));
                    self.ears.hub.ring(&channel);
                }
            }
            Heard::Unsubscribed(channel) => {
                confirm(&mut self.unconfirmed, channel);
            }
            Heard::Message(channel) => {
                self.ears.hub.ring(&channel.into());
            }
            Heard::Next(channel) => {
                if self.planned.len() < MOST_PLANNED {
                    self.planned.push_back((self.context.clock.now() + AFTER_PROMISE, channel.into()));
                }
            }
            Heard::Refused(words) => {
                tracing::warn!(cause = %error::refused(words), "cannot subscribe: waiters poll");
            }
            Heard::Nothing => {}
        }
    }
}

/// Completes at the end of the sleep; never without one.
async fn when_planned(sleep: &mut Option<impl Future<Output = ()> + Unpin>) {
    match sleep {
        Some(sleep) => sleep.await,
        None => std::future::pending().await,
    }
}

/// Counts a confirmation; returns whether no other is outstanding for the channel.
fn confirm(unconfirmed: &mut HashMap<Channel, u32>, channel: &str) -> bool {
    match unconfirmed.get_mut(channel) {
        Some(count) if *count > 1 => {
            *count -= 1;
            false
        }
        _ => unconfirmed.remove(channel).is_some(),
    }
}

/// What is worth heeding. A message is a hint: it says when to look, and nothing else.
#[derive(Debug, PartialEq, Eq)]
enum Heard<'a> {
    Subscribed(&'a str),
    Unsubscribed(&'a str),
    Message(&'a str),
    /// The waiter before was woken.
    Next(&'a str),
    Refused(&'a str),
    Nothing,
}

/// No event of a contender is longer; what is, is none.
const LONGEST: usize = 512;

impl<'a> Heard<'a> {
    fn of(reply: &'a Reply) -> Self {
        match reply {
            Reply::Error(words) => Self::Refused(words),
            Reply::Array(parts) => match &parts[..] {
                [kind, channel, Reply::Int(_)] if kind.text() == Some("subscribe") => {
                    channel.text().map_or(Self::Nothing, Self::Subscribed)
                }
                [kind, channel, Reply::Int(_)] if kind.text() == Some("unsubscribe") => {
                    channel.text().map_or(Self::Nothing, Self::Unsubscribed)
                }
                [kind, channel, Reply::Bulk(event)] if kind.text() == Some("message") && is_event(event) => {
                    channel.text().map_or(Self::Nothing, Self::Message)
                }
                [kind, channel, Reply::Bulk(event)] if kind.text() == Some("message") && is_next(event) => {
                    channel.text().map_or(Self::Nothing, Self::Next)
                }
                _ => Self::Nothing,
            },
            _ => Self::Nothing,
        }
    }
}

/// Whether it reads `<event>@@<contender>`.
fn is_event(event: &[u8]) -> bool {
    let known = |event: &str| event.starts_with("acquired@@") || event.starts_with("released@@");
    event.len() <= LONGEST && std::str::from_utf8(event).is_ok_and(known)
}

fn is_next(event: &[u8]) -> bool {
    event.len() <= LONGEST && event.starts_with(b"next@@")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(bytes: impl AsRef<[u8]>) -> Reply {
        Reply::Bulk(bytes.as_ref().to_vec())
    }

    fn message(event: impl AsRef<[u8]>) -> Reply {
        Reply::Array(vec![bulk("message"), bulk("simba:{m}"), bulk(event)])
    }

    #[test]
    fn events_are_told_from_noise() {
        assert_eq!(Heard::of(&message("acquired@@a@@b")), Heard::Message("simba:{m}"));
        assert_eq!(Heard::of(&message("released@@x@")), Heard::Message("simba:{m}"));
        assert_eq!(Heard::of(&message("next@@x@")), Heard::Next("simba:{m}"));
        let long = format!("released@@{}", "x".repeat(1 << 20));
        for event in ["", "@@", "renewed@@a", "released", &long] {
            assert_eq!(Heard::of(&message(event)), Heard::Nothing, "{event:.20}");
        }
        assert_eq!(Heard::of(&message(b"released@@\xff")), Heard::Nothing);
        assert_eq!(Heard::of(&bulk("released@@a")), Heard::Nothing);
    }
}
