//! The connection for wake-ups: one channel per handle, subscribed to when the first session wants it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use simba_core::{MutexName, Result, within};
use simba_net::Backoff;
use tokio_postgres::types::Type;

use crate::config::Pooler;
use crate::error::of_fault;
use crate::handle::{Handle, Hints, Nature};
use crate::line::{Ear, Line, open_any};
use crate::rows::get;
use crate::statements::{LIVENESS, Query};
use crate::wire::settings;

/// How long a message to ourselves may take.
const ECHO: Duration = Duration::from_secs(1);
/// How long to leave a pooler alone before the next test.
const REST: Duration = Duration::from_secs(60);
/// How long an entry of a watcher lasts, and how often it is renewed.
const WATCH: Duration = Duration::from_secs(60);
const REFRESH: Duration = Duration::from_secs(20);
/// How soon what failed is tried again.
const AGAIN: Duration = Duration::from_millis(500);
/// When a waiter polls whose mutex is free and promised to another, in milliseconds: at random, so that not all
/// handles poll at once, and within a second.
const RECHECK: std::ops::Range<u64> = 400..800;

/// Keeps the subscription from the first demand on.
pub(crate) async fn run(handle: &Arc<Handle>) {
    if handle.config.pooler == Pooler::Yes {
        return std::future::pending().await;
    }
    handle.wanted.notified().await;
    let ear = ear(handle);
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(2));
    loop {
        match subscribe(handle, &ear).await {
            Ok(Some(line)) => {
                backoff.reset();
                serve(handle, &line).await;
                line.abort();
            }
            Ok(None) => {
                give_up(handle);
                handle.clock.sleep_until(handle.clock.now() + REST).await;
                continue;
            }
            Err(error) => tracing::debug!(%error, "no subscription for wake-ups"),
        }
        if handle.hints.send_if_modified(|hints| std::mem::replace(hints, Hints::Down) == Hints::Up) {
            // The lock that showed that our waiters live is gone, and others pass them over. Each waiter makes its
            // entry one that needs no lock, and keeps its place.
            handle.turns.ring_all();
        }
        handle.clock.sleep_until(handle.clock.now() + backoff.pause()).await;
    }
}

/// Takes messages for as long as the handle is there.
fn ear(handle: &Arc<Handle>) -> Ear {
    let handle = Arc::downgrade(handle);
    Arc::new(move |payload| {
        if let Some(handle) = handle.upgrade() {
            handle.hear(payload);
        }
    })
}

/// Opens the connection, subscribes, and locks what shows that this handle is alive; nothing if a pooler keeps the
/// messages from us.
async fn subscribe(handle: &Handle, ear: &Ear) -> Result<Option<Line>> {
    let place = handle.place.load(Ordering::Relaxed);
    let (_, line) = open_any(&handle.config, &*handle.clock, place, Some(ear)).await?;
    let listen = format!("LISTEN {}; LISTEN {}", handle.channel, handle.live_channel);
    if !line.is_direct() && handle.nature() != Nature::Session {
        send(handle, &line, &listen).await?;
        if !echoes(handle, &line).await? {
            return Ok(None);
        }
    }
    // Only now: a lock would stay with a server process of the pool. It is shared, since the connection before this
    // one may not be missed yet. The settings let the server notice within seconds that this host is gone.
    let settings = settings(&handle.config);
    let lock = format!("SELECT pg_advisory_lock_shared({LIVENESS}, hashtext('{}'))", handle.live_channel);
    send(handle, &line, &format!("{listen}; {settings}; {lock}")).await?;
    Ok(Some(line))
}

async fn send(handle: &Handle, line: &Line, text: &str) -> Result<()> {
    let sent =
        async { line.client.batch_execute(text).await.map_err(|fault| of_fault(fault, &handle.config)) };
    handle.in_time(sent).await
}

/// Whether a message that another connection of ours sends arrives here. Where each transaction has another
/// server process, it does not: ours listened in a transaction that is over.
async fn echoes(handle: &Handle, line: &Line) -> Result<bool> {
    let number = fastrand::u64(1..);
    let mut heard = handle.echo.subscribe();
    let sent = async {
        let wire = handle.wire().await?;
        let payload = format!("echo {number}");
        let params: [(crate::wire::Param<'_>, Type); 2] =
            [(&handle.channel, Type::TEXT), (&payload, Type::TEXT)];
        let sent = wire.text("SELECT pg_notify($1, $2)", &params).await;
        sent.map_err(|trouble| handle.failed(&wire, trouble))
    };
    handle.in_time(sent).await?;
    // Nothing is asked over this line meanwhile: that could lend it the very process that listens.
    if within(&*handle.clock, ECHO, heard.wait_for(|heard| *heard == number)).await.is_some() {
        return Ok(true);
    }
    // Both connections answer: it is not the network that keeps the message back.
    let alive = async {
        let alive = line.client.query_typed("SELECT 1", &[]).await;
        alive.map_err(|fault| of_fault(fault, &handle.config))
    };
    handle.in_time(alive).await?;
    Ok(false)
}

/// Hints are off: says so once.
fn give_up(handle: &Handle) {
    handle.learn(Nature::Pooled);
    handle.hints.send_replace(Hints::Off);
    if !handle.warned.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            backend = crate::NAME,
            "a transaction pooler stands in front of the server: no wake-up arrives, waiters poll; connect to \
             the server itself, or to a pool in session mode"
        );
    }
}

/// Passes messages on until the connection ends.
async fn serve(handle: &Handle, line: &Line) {
    handle.learn(Nature::Session);
    handle.proven.notify_one();
    handle.hints.send_replace(Hints::Up);
    // Anything may have been missed.
    handle.turns.ring_all();
    let (mut refresh, mut ping) = (handle.clock.now(), handle.clock.now() + handle.config.ping);
    let (mut missing, mut recheck) = (Vec::new(), None);
    let mut again = refresh;
    loop {
        tokio::select! {
            biased;
            () = line.ended() => return,
            () = handle.clock.sleep_until(refresh) => {
                missing = watch(handle, handle.owners.resubscribe()).await;
                (refresh, again) = (handle.clock.now() + REFRESH, handle.clock.now() + AGAIN);
            }
            () = handle.clock.sleep_until(again), if !missing.is_empty() => {
                missing = watch(handle, std::mem::take(&mut missing)).await;
                again = handle.clock.now() + AGAIN;
            }
            demand = handle.owners.demand() => {
                missing.extend(watch(handle, demand.subscribe).await);
                if !unwatch(handle, &demand.unsubscribe).await {
                    refresh = refresh.min(handle.clock.now() + AGAIN);
                }
                again = handle.clock.now() + AGAIN;
            }
            () = handle.recheck_wanted.notified(), if recheck.is_none() => {
                recheck = Some(handle.clock.now() + Duration::from_millis(fastrand::u64(RECHECK)));
            }
            () = handle.clock.sleep_until(recheck.unwrap_or(ping)), if recheck.is_some() => {
                recheck = None;
                handle.wake_rechecks();
            }
            () = handle.clock.sleep_until(ping) => {
                if !is_alive(handle, line).await {
                    return;
                }
                ping = handle.clock.now() + handle.config.ping;
            }
        }
    }
}

async fn is_alive(handle: &Handle, line: &Line) -> bool {
    let answer =
        within(&*handle.clock, handle.config.silence(), line.client.query_typed("SELECT 1", &[])).await;
    matches!(answer, Some(Ok(_)))
}

/// Lets everyone who takes or frees these mutexes tell us, and then lets those who watch look again. Returns the
/// mutexes that are not watched yet, since their rows are locked or the call failed.
async fn watch(handle: &Handle, mutexes: Vec<MutexName>) -> Vec<MutexName> {
    if mutexes.is_empty() {
        return mutexes;
    }
    let names: Vec<&str> = mutexes.iter().map(MutexName::as_str).collect();
    let entry = WATCH.as_secs_f64();
    let watched = match handle.ask_all(Query::Watch, &[&names, &handle.channel, &entry]).await {
        Ok(rows) => rows,
        Err(error) => {
            tracing::debug!(%error, "mutexes are not watched yet");
            return mutexes;
        }
    };
    let watched: HashSet<&str> = watched.iter().filter_map(|row| get(row, 0).ok()).collect();
    let (watched, missing): (Vec<_>, _) =
        mutexes.into_iter().partition(|mutex| watched.contains(mutex.as_str()));
    for mutex in &watched {
        handle.owners.ring(mutex);
    }
    missing
}

async fn unwatch(handle: &Handle, mutexes: &[MutexName]) -> bool {
    if mutexes.is_empty() {
        return true;
    }
    let names: Vec<&str> = mutexes.iter().map(MutexName::as_str).collect();
    // An entry that stays ends by itself.
    handle.ask_all(Query::Unwatch, &[&names, &handle.channel]).await.is_ok()
}
