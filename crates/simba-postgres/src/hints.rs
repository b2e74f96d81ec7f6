//! The connection for wake-ups: one channel per handle, subscribed to when the first session wants it.

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
use crate::statements::Query;

/// How long a message to ourselves may take.
const ECHO: Duration = Duration::from_secs(1);
/// How long to leave a pooler alone before the next test.
const REST: Duration = Duration::from_secs(60);
/// How long an entry of a watcher lasts, and how often it is renewed.
const WATCH: Duration = Duration::from_secs(60);
const REFRESH: Duration = Duration::from_secs(20);
/// How soon what failed is tried again.
const AGAIN: Duration = Duration::from_millis(500);

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
        handle.hints.send_if_modified(|hints| std::mem::replace(hints, Hints::Down) == Hints::Up);
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

/// Opens the connection and subscribes; nothing if a pooler keeps the messages from us.
async fn subscribe(handle: &Handle, ear: &Ear) -> Result<Option<Line>> {
    let place = handle.place.load(Ordering::Relaxed);
    let (_, line) = open_any(&handle.config, &*handle.clock, place, Some(ear)).await?;
    let listen = format!("LISTEN {}", handle.channel);
    let listening =
        async { line.client.batch_execute(&listen).await.map_err(|fault| of_fault(fault, &handle.config)) };
    handle.in_time(listening).await?;
    let heard = line.is_direct() || handle.nature() == Nature::Session || echoes(handle, &line).await?;
    Ok(heard.then_some(line))
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
    loop {
        tokio::select! {
            biased;
            () = line.ended() => return,
            () = handle.clock.sleep_until(refresh) => {
                let watched = watch(handle, handle.owners.resubscribe()).await;
                refresh = handle.clock.now() + if watched { REFRESH } else { AGAIN };
            }
            demand = handle.owners.demand() => {
                let done = watch(handle, demand.subscribe).await & unwatch(handle, &demand.unsubscribe).await;
                if !done {
                    refresh = refresh.min(handle.clock.now() + AGAIN);
                }
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

/// Lets everyone who takes or frees these mutexes tell us, and then lets those who watch look again.
async fn watch(handle: &Handle, mutexes: Vec<MutexName>) -> bool {
    if mutexes.is_empty() {
        return true;
    }
    let names: Vec<&str> = mutexes.iter().map(MutexName::as_str).collect();
    let entry = WATCH.as_secs_f64();
    match handle.ask_all(Query::Watch, &[&names, &handle.channel, &entry]).await {
        Ok(_) => {
            for mutex in &mutexes {
                handle.owners.ring(mutex);
            }
            true
        }
        Err(error) => {
            tracing::debug!(%error, "mutexes are not watched yet");
            false
        }
    }
}

async fn unwatch(handle: &Handle, mutexes: &[MutexName]) -> bool {
    if mutexes.is_empty() {
        return true;
    }
    let names: Vec<&str> = mutexes.iter().map(MutexName::as_str).collect();
    // An entry that stays ends by itself.
    handle.ask_all(Query::Unwatch, &[&names, &handle.channel]).await.is_ok()
}
