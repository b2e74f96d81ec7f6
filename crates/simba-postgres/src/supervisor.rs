//! The one task behind a handle: keeps its connections, runs its errands, sends its renewals.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use simba_core::{Moment, Result, within};
use simba_net::Backoff;
use tokio::sync::mpsc;

use crate::config::Pooler;
use crate::errands::{Errand, Errands};
use crate::handle::{Handle, Nature, State};
use crate::line::{open, open_any};
use crate::wire::Wire;
use crate::{error, hints};

/// Tries to connect again come at least this often.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// After a connection that lasted this long the next one is opened at once.
const GOOD: Duration = Duration::from_millis(100);
/// How long the last errands may take when a handle is closed.
const FAREWELL: Duration = Duration::from_secs(1);
/// How far the server's clock may be from where it should be before that is told.
const STEP: Duration = Duration::from_millis(250);

/// Asks for a sign of life, the server's time, and whether it still takes writes.
const PING: &str = "SELECT clock_timestamp(), pg_is_in_recovery()";

/// Opens the first connection for commands.
pub(crate) async fn connect(handle: &Handle) -> Result<Arc<Wire>> {
    let first = handle.place.load(Ordering::Relaxed);
    let (place, line) = open_any(&handle.config, &*handle.clock, first, None).await?;
    handle.place.store(place, Ordering::Relaxed);
    let wire = Arc::new(Wire::new(line, &handle.nature));
    learn(handle, &wire, place != first);
    Ok(wire)
}

/// Opens the next one. Calls go out with the look at the server rather than after it: a leader whose connection
/// broke has the less time to renew, the longer the way to the server is.
async fn reconnect(handle: &Handle) -> Result<Arc<Wire>> {
    let [place] = &handle.config.places[..] else {
        // One of several that takes no writes must fail no call: another one may.
        return connect(handle).await;
    };
    let wire = Arc::new(Wire::new(open(&handle.config, &*handle.clock, place).await?, &handle.nature));
    handle.state.send_replace(State::Up(Arc::clone(&wire)));
    let limit = handle.config.connect_timeout;
    let checked = within(&*handle.clock, limit, wire.check()).await;
    let checked = checked.unwrap_or_else(|| Err(error::unavailable(format!("{place} does not answer"))));
    checked.inspect_err(|_| wire.abort())?;
    learn(handle, &wire, false);
    Ok(wire)
}

/// Keeps what a new connection shows of what is at its other end.
fn learn(handle: &Handle, wire: &Wire, elsewhere: bool) {
    if handle.config.pooler != Pooler::Auto {
        return;
    }
    if wire.is_direct() {
        handle.learn(Nature::Session);
    } else if elsewhere {
        // What was found out is about another server.
        handle.learn(Nature::Unknown);
    }
}

/// Prepares the statements where that is safe. Where they cannot be prepared, each call says why.
pub(crate) async fn prepare(handle: &Handle, wire: &Wire) {
    if handle.nature() != Nature::Session || wire.is_prepared() {
        return;
    }
    let prepared =
        within(&*handle.clock, handle.config.silence(), wire.prepare(&handle.statements, &handle.config));
    match prepared.await {
        Some(Ok(())) => {}
        Some(Err(trouble)) => tracing::debug!(error = %trouble, "statements are not prepared"),
        None => wire.abort(),
    }
}

/// Runs until the handle is closed.
pub(crate) async fn run(handle: Arc<Handle>, wire: Arc<Wire>, errands: mpsc::UnboundedReceiver<Errand>) {
    let mut errands = Errands::new(errands);
    let mut closing = handle.closing.subscribe();
    tokio::select! {
        biased;
        _ = closing.wait_for(|closing| *closing) => {}
        () = work(&handle, wire, &mut errands) => {}
    }
    within(&*handle.clock, FAREWELL, errands.finish(&handle)).await;
    handle.state.send_replace(State::Closed);
    handle.hints.send_replace(crate::handle::Hints::Off);
}

async fn work(handle: &Arc<Handle>, wire: Arc<Wire>, errands: &mut Errands) {
    let commands = keep_connected(handle, wire);
    let (takes, frees) = (handle.takes.run(handle), handle.frees.run(handle));
    tokio::join!(commands, hints::run(handle), errands.run(handle), takes, frees);
}

/// Keeps a connection for commands, whatever happens to it.
async fn keep_connected(handle: &Handle, first: Arc<Wire>) {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut next = Some(first);
    loop {
        let wire = match next.take() {
            Some(wire) => wire,
            None => match reconnect(handle).await {
                Ok(wire) => wire,
                Err(error) => {
                    tracing::debug!(%error, "no connection to PostgreSQL");
                    handle.state.send_replace(State::Failing(error));
                    pause(handle, &mut backoff).await;
                    continue;
                }
            },
        };
        let since = handle.clock.now();
        tend(handle, &wire).await;
        wire.abort();
        handle.state.send_replace(State::Connecting);
        // It could be had: the next one is had as soon. But a server that ends each at once is spared.
        backoff.reset();
        if handle.clock.now() - since < GOOD {
            pause(handle, &mut backoff).await;
        }
    }
}

async fn pause(handle: &Handle, backoff: &mut Backoff) {
    handle.clock.sleep_until(handle.clock.now() + backoff.pause()).await;
}

/// Lets calls use a connection for as long as it answers.
async fn tend(handle: &Handle, wire: &Arc<Wire>) {
    handle.state.send_replace(State::Up(Arc::clone(wire)));
    let _ = handle.errands.send(Errand::Sweep);
    if handle.nature() == Nature::Unknown {
        // Only a message to ourselves tells what is at the other end.
        handle.wanted.notify_one();
    }
    // Calls that wait for the connection need not wait for this as well: they go out before it.
    prepare(handle, wire).await;
    let Some(mut last) = ping(handle, wire).await else { return };
    loop {
        let next = handle.clock.now() + handle.config.ping;
        tokio::select! {
            biased;
            () = wire.ended() => return,
            () = handle.proven.notified() => {}
            () = handle.clock.sleep_until(next) => match ping(handle, wire).await {
                Some(told) => compare(std::mem::replace(&mut last, told), told),
                None => return,
            },
        }
        prepare(handle, wire).await;
    }
}

/// What the server's clock said between two moments of ours.
#[derive(Clone, Copy)]
struct Told {
    before: Moment,
    server: SystemTime,
    after: Moment,
}

async fn ping(handle: &Handle, wire: &Wire) -> Option<Told> {
    let before = handle.clock.now();
    let answer = within(&*handle.clock, handle.config.silence(), wire.text(PING, &[])).await;
    let rows = match answer {
        Some(Ok(rows)) => rows,
        Some(Err(trouble)) => {
            tracing::debug!(error = %trouble, "PostgreSQL refuses a sign of life");
            return None;
        }
        None => {
            tracing::debug!("PostgreSQL gives no sign of life: connecting again");
            return None;
        }
    };
    let after = handle.clock.now();
    let row = rows.first()?;
    if row.try_get(1).ok()? {
        tracing::warn!("the PostgreSQL server has become a standby: connecting again");
        return None;
    }
    Some(Told { before, server: row.try_get(0).ok()?, after })
}

/// Leases end by the server's clock: if that is set, they end early or late.
fn compare(last: Told, now: Told) {
    let (least, most) = (now.before - last.after, now.after - last.before);
    let early = now.server < last.server + least.saturating_sub(STEP);
    let late = now.server > last.server + most + STEP;
    if early || late {
        tracing::warn!(
            backend = crate::NAME,
            direction = if late { "forward" } else { "back" },
            "the clock of the server was set: leases end too early or too late until each is renewed"
        );
    }
}

impl Handle {
    /// Ends the supervisor; sessions fail from now on.
    pub(crate) fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Completes once the supervisor has ended.
    pub(crate) async fn closed(&self) {
        let mut state = self.state.subscribe();
        let ended = state.wait_for(|state| matches!(state, State::Closed));
        // A supervisor whose runtime is gone says nothing.
        if within(&*self.clock, FAREWELL * 2, ended).await.is_none() {
            self.state.send_replace(State::Closed);
        }
    }

    /// The error of a call that waits for nothing any more.
    pub(crate) fn no_hints() -> simba_core::Error {
        error::unavailable("behind a transaction pooler no wake-up arrives: waiters poll")
    }
}
