//! A mixed fleet: contenders that behave as JVM Simba does, with its flaws, beside ours on the same rows.
//!
//! The peer follows the statements of the wire contract: an update and a select in one transaction, no
//! deadline of its own, expiry counted from the receipt of a reply, renewal at the end of the ttl, a pause of
//! a whole ttl after an error, a pause of the whole lease while another holds, and a release before its work
//! has ended.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::Product;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder};
use simba_core::{Clock, ContenderId, Lease, Moment, MutexName, Simba, SystemClock};
use simba_tck::Fixture;
use tokio::task::JoinHandle;
use tokio::time::sleep;

on_both_servers! {
    row_56_a_mixed_fleet_never_overlaps_and_both_sides_win
    a_row_is_left_as_the_wire_contract_says
}

const NOW: &str = "CAST(UNIX_TIMESTAMP(CURRENT_TIMESTAMP(3)) * 1000 AS UNSIGNED)";

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// One hold of a mutex: its holder, and from when to when it was valid, on one clock.
#[derive(Clone, Debug)]
struct Span {
    holder: String,
    from: Moment,
    to: Moment,
}

/// The holds of all contenders.
#[derive(Default)]
struct History {
    spans: Mutex<Vec<(usize, Span)>>,
    ours: AtomicU32,
    theirs: AtomicU32,
}

impl History {
    fn record(&self, mutex: usize, holder: &str, from: Moment, to: Moment) {
        self.spans.lock().unwrap().push((mutex, Span { holder: holder.to_owned(), from, to }));
    }

    /// Returns the pairs that held the same mutex at the same time.
    fn overlaps(&self) -> Vec<(Span, Span)> {
        let spans = self.spans.lock().unwrap();
        let mut overlaps = Vec::new();
        for (at, (mutex, one)) in spans.iter().enumerate() {
            for (_, other) in spans[at + 1..].iter().filter(|(other, _)| other == mutex) {
                let apart = one.to <= other.from || other.to <= one.from;
                if !apart && one.holder != other.holder {
                    overlaps.push((one.clone(), other.clone()));
                }
            }
        }
        overlaps
    }
}

fn now() -> Moment {
    SystemClock.now()
}

/// A contender of JVM Simba's JDBC backend, as seen on the wire.
struct Jvm {
    conn: Conn,
    id: String,
    mutex: MutexName,
    lease: Lease,
}

/// The row after a call, and the time that is left to its holder.
struct RowState {
    owner: String,
    ttl_left: Duration,
    left: Duration,
}

impl Jvm {
    async fn connect(url: &str, mutex: MutexName, at: usize, lease: Lease) -> Self {
        let opts = OptsBuilder::from_opts(Opts::from_url(url).unwrap()).prefer_socket(false);
        let mut conn = Conn::new(opts).await.unwrap();
        conn.query_drop("SET time_zone = '+00:00'").await.unwrap();
        Self { conn, id: format!("{at}:{}@10.0.0.{at}", std::process::id()), mutex, lease }
    }

    /// Sends one transaction: the update of acquire or renew, then a read.
    async fn contend(&mut self) -> mysql_async::Result<RowState> {
        let update = format!(
            "UPDATE simba_mutex SET acquired_at = {NOW}, ttl_at = {NOW} + ?, transition_at = {NOW} + ?, owner_id = ?, \
             version = version + 1 WHERE mutex = ? AND ((transition_at < {NOW}) OR (owner_id = ? AND transition_at > {NOW}))"
        );
        let select = format!(
            "SELECT owner_id, CAST(ttl_at AS SIGNED) - CAST({NOW} AS SIGNED), \
             CAST(transition_at AS SIGNED) - CAST({NOW} AS SIGNED) FROM simba_mutex WHERE mutex = ?"
        );
        let (ttl, total) = (self.lease.ttl().as_millis() as u64, self.lease.total().as_millis() as u64);
        let mutex = self.mutex.to_string();
        self.conn.query_drop("BEGIN").await?;
        self.conn.exec_drop(update, (ttl, total, &self.id, &mutex, &self.id)).await?;
        let row: Option<(String, i64, i64)> = self.conn.exec_first(select, (&mutex,)).await?;
        self.conn.query_drop("COMMIT").await?;
        let (owner, ttl_left, left) = row.unwrap_or_default();
        let positive = |left: i64| ms(u64::try_from(left).unwrap_or(0));
        Ok(RowState { owner, ttl_left: positive(ttl_left), left: positive(left) })
    }

    async fn release(&mut self) -> mysql_async::Result<()> {
        let free = "UPDATE simba_mutex SET acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', \
                    version = version + 1 WHERE mutex = ? AND owner_id = ?";
        self.conn.exec_drop(free, (self.mutex.as_str(), self.id.as_str())).await
    }

    /// Contends until it is aborted; every third renewal is followed by a release.
    async fn run(mut self, at: usize, history: Arc<History>) {
        let (mut hold, mut renewals) = (None::<(Moment, Moment)>, 0);
        loop {
            let sent = now();
            let Ok(state) = self.contend().await else {
                let _ = self.conn.query_drop("ROLLBACK").await;
                sleep(self.lease.ttl()).await;
                continue;
            };
            if state.owner != self.id {
                // Sleeps for the rest of the lease that it read, with jitter.
                hold = None;
                let jitter = 1.2 * fastrand() - 0.2;
                sleep(state.left.saturating_add(self.lease.ttl().mul_f64(jitter.max(0.0) / 2.0))).await;
                continue;
            }
            // It holds from the reply on, to the end of its lease in the row. That it may believe to hold
            // beyond that is its own flaw. If that end came before the reply, another may have held
            // meanwhile.
            let since = match hold {
                Some((since, end)) if now() < end => since,
                _ => {
                    history.theirs.fetch_add(1, Ordering::Relaxed);
                    now()
                }
            };
            let end = sent + self.lease.total();
            hold = Some((since, end));
            history.record(at, &self.id, since, end);
            renewals += 1;
            sleep(state.ttl_left).await;
            if renewals % 3 == 0 {
                // Recorded first: the task may be aborted during the release.
                history.shorten(at, &self.id, now());
                let _ = self.release().await;
                hold = None;
                sleep(self.lease.ttl().mul_f64(fastrand())).await;
            }
        }
    }
}

impl History {
    /// Ends the recorded holds of this holder here.
    fn shorten(&self, mutex: usize, holder: &str, to: Moment) {
        let mut spans = self.spans.lock().unwrap();
        for (_, span) in spans.iter_mut().filter(|(at, span)| *at == mutex && span.holder == holder) {
            span.to = span.to.min(to);
        }
    }
}

fn fastrand() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    (RandomState::new().hash_one(0) % 1_000) as f64 / 1_000.0
}

/// One of ours: locks, works, releases; sometimes it crashes while it holds the mutex.
async fn ours(on: Product, at: usize, mutex: MutexName, lease: Lease, history: Arc<History>) {
    loop {
        let connection = on.fixture().connect().await;
        let simba = Simba::builder(connection.backend).with_lease(lease).build();
        for round in 0.. {
            let locker = simba.locker(mutex.clone());
            let Ok(guard) = locker.lock().await else { continue };
            history.ours.fetch_add(1, Ordering::Relaxed);
            let (tenure, from) = (guard.tenure(), now());
            sleep(lease.total().mul_f64(fastrand() * 1.2)).await;
            if round > 2 && fastrand() < 0.2 {
                // A crash: nothing reaches the server any more. The hold is valid to its deadline.
                connection.network.stall();
                tenure.lost().await;
                history.record(at, tenure.contender().as_str(), from, tenure.deadline());
                break;
            }
            // Time may pass between the two checks.
            let to = if tenure.is_held() { now().min(tenure.deadline()) } else { tenure.deadline() };
            history.record(at, tenure.contender().as_str(), from, to);
            let _ = guard.release().await;
            sleep(lease.ttl().mul_f64(fastrand())).await;
        }
    }
}

/// Row 56 on MySQL: contenders of ours and JVM contenders on three rows, with crashes and restarts.
async fn row_56_a_mixed_fleet_never_overlaps_and_both_sides_win(on: Product) {
    let url = common::least_url(on.shared().await);
    let lease = Lease::new(ms(400), ms(300)).unwrap();
    let (history, names): (Arc<History>, Vec<MutexName>) =
        (Arc::default(), (0..3).map(|_| common::name("mixed")).collect());
    let mut admin = common::admin(&on.admin_url()).await;
    for name in &names {
        admin
            .exec_drop("INSERT IGNORE INTO simba_mutex VALUES (?, 0, 0, 0, '', 0)", (name.as_str(),))
            .await
            .unwrap();
    }
    let mut fleet: Vec<JoinHandle<()>> = Vec::new();
    for (at, name) in names.iter().enumerate() {
        for _ in 0..2 {
            fleet.push(tokio::spawn(ours(on, at, name.clone(), lease, Arc::clone(&history))));
        }
    }
    // On a busy machine it takes longer until both sides have acquired often enough.
    let (end, last) = (now() + Duration::from_secs(20), now() + Duration::from_secs(300));
    let won = || (history.ours.load(Ordering::Relaxed), history.theirs.load(Ordering::Relaxed));
    let is_enough = |(ours, theirs): (u32, u32)| ours >= 10 && theirs >= 5;
    let mut jvms: Vec<(usize, JoinHandle<()>)> = Vec::new();
    let mut started = 0;
    while now() < end || (now() < last && !is_enough(won())) {
        while jvms.len() < 6 {
            // Their lease differs from ours, which is allowed: times in the row are absolute.
            let at = started % 3;
            started += 1;
            let theirs = Lease::new(ms(300), ms(200)).unwrap();
            let jvm = Jvm::connect(&url, names[at].clone(), started, theirs).await;
            jvms.push((at, tokio::spawn(jvm.run(at, Arc::clone(&history)))));
        }
        sleep(ms(700)).await;
        // One of them crashes at a random point.
        let (_, crashed) = jvms.remove((fastrand() * jvms.len() as f64) as usize);
        crashed.abort();
    }
    fleet.iter().chain(jvms.iter().map(|(_, jvm)| jvm)).for_each(JoinHandle::abort);
    let overlaps = history.overlaps();
    assert!(overlaps.is_empty(), "{} overlaps, the first: {:#?}", overlaps.len(), overlaps[0]);
    assert!(is_enough(won()), "both sides win: {:?}, ours and theirs", won());
}

/// We leave a row as a JVM peer does, so each side can continue from what the other wrote.
async fn a_row_is_left_as_the_wire_contract_says(on: Product) {
    let url = common::least_url(on.shared().await);
    let simba = Simba::builder(Arc::new(common::connect(&url).await)).build();
    let mutex = common::name("wire");
    let mut admin = common::admin(&on.admin_url()).await;
    let columns = format!(
        "SELECT acquired_at, ttl_at, transition_at, owner_id, version, {NOW} FROM simba_mutex WHERE mutex = ?"
    );
    admin.query_drop("SET time_zone = '+00:00'").await.unwrap();
    let guard = simba.locker(mutex.clone()).lock().await.unwrap();
    let (acquired, ttl, transition, owner, version, at): (u64, u64, u64, String, u64, u64) =
        admin.exec_first(&columns, (mutex.as_str(),)).await.unwrap().unwrap();
    assert_eq!((ttl - acquired, transition - acquired), (10_000, 16_000));
    // Time zones differ by at least a quarter of an hour.
    assert!(at - acquired < 600_000, "milliseconds since 1970, in UTC");
    assert_eq!((owner.as_str(), version), (guard.tenure().contender().as_str(), guard.token().get()));
    guard.release().await.unwrap();
    let freed: (u64, u64, u64, String, u64, u64) =
        admin.exec_first(&columns, (mutex.as_str(),)).await.unwrap().unwrap();
    assert_eq!((freed.0, freed.1, freed.2, freed.3.as_str(), freed.4), (0, 0, 0, "", version + 1));
    // A JVM peer takes the mutex; we see its id, wait, and acquire next with a greater token.
    let lease = Lease::new(ms(30_000), ms(30_000)).unwrap();
    let mut jvm = Jvm::connect(&url, mutex.clone(), 1, lease).await;
    assert_eq!(jvm.contend().await.unwrap().owner, jvm.id);
    let locker = simba.locker(mutex.clone());
    assert!(locker.try_lock().await.unwrap().is_none());
    assert!(locker.last_holder().is_owner(&ContenderId::foreign(&jvm.id).unwrap()));
    jvm.release().await.unwrap();
    let next = simba.locker(mutex).lock().await.unwrap();
    assert!(next.token().get() > version + 2);
    assert_ne!(jvm.contend().await.unwrap().owner, jvm.id, "a JVM peer does not take a held mutex");
    simba.shutdown().await;
}
