//! Wake-ups of all sessions over one connection that receives published messages.

use std::collections::{HashMap, HashSet, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::spi::{Demand, Subscription, Wakeups, within};
use simba_core::{Clock, Error, Moment, Result};
use simba_net::supervise::{self, Connector, Retry, Supervised};

use crate::connection::Connection;
use crate::error;
use crate::resp::{self, Reply};
use crate::route::Route;
use crate::supervisor::{Context, MAX_ATTEMPT};

/// Name of a channel.
pub(crate) type Channel = Arc<str>;

/// Maximum number of channels in one command, so that it neither fills the server's buffers nor blocks other clients.
const CHUNK: usize = 1000;
/// Number of consecutive checks without a message after which a connection counts as broken.
const SILENT_CHECKS: u32 = 4;
/// Delay from `next@@…` to the wake-up: the scripts reserve the mutex for the waiter before it for one second.
const AFTER_RESERVATION: Duration = Duration::from_millis(1050);
/// Maximum number of planned wake-ups. Beyond it, the waiter relies on its poll.
const MAX_PLANNED: usize = 1 << 16;

/// Subscriptions of a handle's sessions, and the channels that the server has confirmed.
pub(crate) struct Subscriptions {
    wakeups: Wakeups<Channel>,
    confirmed: Mutex<HashSet<Channel>>,
}

impl Subscriptions {
    pub(crate) fn new() -> Self {
        Self { wakeups: Wakeups::new(), confirmed: Mutex::default() }
    }

    /// Subscribes to a channel. The first wake-up comes as soon as the server has confirmed the channel.
    pub(crate) fn subscribe(&self, channel: &Channel) -> Subscription<Channel> {
        let subscription = self.wakeups.subscribe(Arc::clone(channel));
        if self.confirmed().contains(channel) {
            subscription.notify();
        }
        subscription
    }

    fn confirmed(&self) -> MutexGuard<'_, HashSet<Channel>> {
        self.confirmed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Receives messages and notifies the subscriptions, until the task is aborted. Connects at the first subscription.
pub(crate) async fn run(subscriptions: Arc<Subscriptions>, route: Arc<Route>, context: Arc<Context>) {
    subscriptions.wakeups.demand().await;
    let clock = Arc::clone(&context.clock);
    let mut connector = SubscriberConnector { subscriptions, route, context, opened: None };
    Supervised::new().run(&mut connector, &*clock, Retry::default()).await;
}

/// Opens and runs the connections that receive messages.
struct SubscriberConnector {
    subscriptions: Arc<Subscriptions>,
    route: Arc<Route>,
    context: Arc<Context>,
    /// The connection that is about to run.
    opened: Option<Connection>,
}

/// Stands for the connection, which no call uses.
#[derive(Clone)]
struct Connected;

impl supervise::Connection for Connected {}

impl Connector for SubscriberConnector {
    type Connection = Connected;

    fn limit(&self) -> Duration {
        MAX_ATTEMPT
    }

    async fn connect(&mut self, _: usize) -> Result<Connected> {
        self.opened = Some(self.route.connect_subscriber().await?);
        Ok(Connected)
    }

    async fn serve(&mut self, _: &Connected) -> Error {
        let Some(connection) = self.opened.take() else { return error::disconnected() };
        let subscriber = Subscriber::new(&self.subscriptions, &self.context, connection);
        let Err(cause) = tokio::select! {
            biased;
            ended = subscriber.run() => ended,
            () = self.context.server_changed.notified() => Err(error::disconnected()),
        };
        self.subscriptions.confirmed().clear();
        cause
    }
}

/// One connection that receives messages.
struct Subscriber<'a> {
    subscriptions: &'a Subscriptions,
    context: &'a Context,
    connection: Connection,
    /// Whether a reply is outstanding.
    awaiting: bool,
    /// Number of checks since something was received, or since the command was sent whose reply is outstanding.
    quiet_checks: u32,
    /// Number of outstanding confirmations of each channel. A subscription that was cancelled before its confirmation
    /// does not count as confirmed.
    unconfirmed: HashMap<Channel, u32>,
    /// Planned wake-ups, ordered by time.
    planned: VecDeque<(Moment, Channel)>,
}

impl<'a> Subscriber<'a> {
    fn new(subscriptions: &'a Subscriptions, context: &'a Context, connection: Connection) -> Self {
        let (unconfirmed, planned) = (HashMap::new(), VecDeque::new());
        Self { subscriptions, context, connection, awaiting: false, quiet_checks: 0, unconfirmed, planned }
    }

    async fn run(mut self) -> Result<Infallible> {
        // Includes the current demand. The confirmation of a channel wakes its subscriptions, since they may have
        // missed messages.
        let channels = self.subscriptions.wakeups.resubscribe();
        self.send_channels("SUBSCRIBE", &channels).await?;
        let (clock, every) = (&*self.context.clock, self.context.settings.timeout / SILENT_CHECKS);
        let mut check = clock.sleep_until(clock.now() + every);
        loop {
            let planned = self.planned.front().map(|(at, _)| *at);
            tokio::select! {
                biased;
                reply = self.connection.reply() => self.handle_reply(&reply?),
                demand = self.subscriptions.wakeups.demand() => self.apply_demand(&demand).await?,
                () = &mut check => {
                    check = clock.sleep_until(clock.now() + every);
                    self.check_silence(every).await?;
                }
                () = sleep_until(clock, planned) => self.notify_planned(clock.now()),
            }
        }
    }

    /// Fails if a reply is overdue. Pings an idle connection.
    async fn check_silence(&mut self, every: Duration) -> Result<()> {
        self.quiet_checks += 1;
        match self.awaiting {
            true if self.quiet_checks >= SILENT_CHECKS => Err(error::silent(self.context.settings.timeout)),
            false if every * self.quiet_checks >= self.context.settings.ping => {
                self.send(&resp::command(&["PING"])).await
            }
            _ => Ok(()),
        }
    }

    async fn apply_demand(&mut self, demand: &Demand<Channel>) -> Result<()> {
        for channel in &demand.unsubscribe {
            self.subscriptions.confirmed().remove(channel);
        }
        self.send_channels("SUBSCRIBE", &demand.subscribe).await?;
        self.send_channels("UNSUBSCRIBE", &demand.unsubscribe).await
    }

    async fn send_channels(&mut self, command: &str, channels: &[Channel]) -> Result<()> {
        for chunk in channels.chunks(CHUNK) {
            for channel in chunk {
                *self.unconfirmed.entry(Arc::clone(channel)).or_default() += 1;
            }
            let parts: Vec<&str> =
                std::iter::once(command).chain(chunk.iter().map(|channel| &**channel)).collect();
            self.send(&resp::command(&parts)).await?;
        }
        Ok(())
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        if !std::mem::replace(&mut self.awaiting, true) {
            self.quiet_checks = 0;
        }
        let limit = self.context.settings.timeout;
        let sent = within(&*self.context.clock, limit, self.connection.send(bytes)).await;
        sent.unwrap_or_else(|| Err(error::silent(limit)))
    }

    fn notify_planned(&mut self, now: Moment) {
        let due = self.planned.partition_point(|(at, _)| *at <= now);
        for (_, channel) in self.planned.drain(..due) {
            self.subscriptions.wakeups.notify(&channel);
        }
    }

    fn handle_reply(&mut self, reply: &Reply) {
        (self.awaiting, self.quiet_checks) = (false, 0);
        match Received::of(reply) {
            Some(Received::Subscribed(channel)) if confirm(&mut self.unconfirmed, channel) => {
                let channel: Channel = channel.into();
                self.subscriptions.confirmed().insert(Arc::clone(&channel));
                self.subscriptions.wakeups.notify(&channel);
            }
            Some(Received::Unsubscribed(channel)) => {
                confirm(&mut self.unconfirmed, channel);
            }
            Some(Received::Message(channel)) => {
                self.subscriptions.wakeups.notify(&channel.into());
            }
            Some(Received::Next(channel)) if self.planned.len() < MAX_PLANNED => {
                self.planned.push_back((self.context.clock.now() + AFTER_RESERVATION, channel.into()));
            }
            Some(Received::Refused(message)) => {
                tracing::warn!(cause = %error::refused(message), "redis: cannot subscribe; waiters poll");
            }
            _ => {}
        }
    }
}

/// Completes at the moment. Never completes without one.
async fn sleep_until(clock: &dyn Clock, at: Option<Moment>) {
    match at {
        Some(at) => clock.sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Counts a confirmation. Returns whether it was the last outstanding one of the channel.
fn confirm(unconfirmed: &mut HashMap<Channel, u32>, channel: &str) -> bool {
    match unconfirmed.get_mut(channel) {
        Some(count) if *count > 1 => {
            *count -= 1;
            false
        }
        _ => unconfirmed.remove(channel).is_some(),
    }
}

/// A parsed reply. A message is a hint: it says that a call is worthwhile, and nothing else.
#[derive(Debug, PartialEq, Eq)]
enum Received<'a> {
    Subscribed(&'a str),
    Unsubscribed(&'a str),
    Message(&'a str),
    /// The preceding waiter was woken.
    Next(&'a str),
    Refused(&'a str),
}

/// Maximum length of an event. Longer messages are ignored.
const MAX_EVENT_BYTES: usize = 512;

impl<'a> Received<'a> {
    fn of(reply: &'a Reply) -> Option<Self> {
        if let Reply::Error(message) = reply {
            return Some(Self::Refused(message));
        }
        let [kind, channel, content] = reply.array()? else { return None };
        let channel = channel.text()?;
        match (kind.text()?, content) {
            ("subscribe", Reply::Int(_)) => Some(Self::Subscribed(channel)),
            ("unsubscribe", Reply::Int(_)) => Some(Self::Unsubscribed(channel)),
            ("message", Reply::Bulk(event)) if event.len() <= MAX_EVENT_BYTES => {
                // An event has the form `<event>@@<contender>`.
                match content.text()?.split_once("@@")?.0 {
                    "acquired" | "released" => Some(Self::Message(channel)),
                    "next" => Some(Self::Next(channel)),
                    _ => None,
                }
            }
            _ => None,
        }
    }
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
    fn malformed_events_are_ignored() {
        assert_eq!(Received::of(&message("acquired@@a@@b")), Some(Received::Message("simba:{m}")));
        assert_eq!(Received::of(&message("released@@x@")), Some(Received::Message("simba:{m}")));
        assert_eq!(Received::of(&message("next@@x@")), Some(Received::Next("simba:{m}")));
        let long = format!("released@@{}", "x".repeat(1 << 20));
        for event in ["", "@@", "renewed@@a", "released", &long] {
            assert_eq!(Received::of(&message(event)), None, "{event:.20}");
        }
        assert_eq!(Received::of(&message(b"released@@\xff")), None);
        assert_eq!(Received::of(&bulk("released@@a")), None);
    }
}
