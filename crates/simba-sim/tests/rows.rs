//! Rows of the fault matrix that virtual time can prove, each with its number.
#![allow(missing_docs, clippy::unwrap_used)]

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use simba_core::operate::MutexRecord;
use simba_core::spi::Operate;
use simba_core::{
    Clock, ContenderId, ErrorKind, Lease, Loss, MemoryBackend, Moment, MutexName, Schedule, Simba, Tenure,
    TokioClock,
};
use simba_sim::{Plan, Scale, run};
use simba_tck::{Call, FaultyBackend, Leg, Passage, SkewedClock, Switch, Weather, What};

const NAME: &str = "orders";
const TOTAL: Duration = ms(1_000);
const DEADLINE: Duration = ms(990);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn lease() -> Lease {
    Lease::new(ms(600), ms(400)).unwrap()
}

/// A store on paused time, whose own clock can be changed.
struct World {
    clock: TokioClock,
    store_clock: SkewedClock,
    store: MemoryBackend,
}

impl World {
    fn new() -> Self {
        let clock = TokioClock::new();
        let store_clock = SkewedClock::new(clock.clone());
        Self { store: MemoryBackend::with_clock(store_clock.clone()), store_clock, clock }
    }

    fn handle(&self) -> (Simba, Arc<Switch>) {
        let switch = Switch::new();
        (self.simba(Arc::<Switch>::clone(&switch)), switch)
    }

    fn simba(&self, weather: Arc<dyn Weather>) -> Simba {
        let backend = FaultyBackend::new(self.store.clone(), self.clock.clone(), weather);
        Simba::builder(Arc::new(backend)).with_clock(self.clock.clone()).with_lease(lease()).build()
    }

    async fn record(&self) -> MutexRecord {
        self.store.read(&MutexName::new(NAME).unwrap()).await.unwrap()
    }

    async fn assert_empty(&self) {
        let record = self.record().await;
        assert!(record.owner.is_none() && record.waiters.unwrap_or(0) == 0, "left behind: {record:?}");
    }

    async fn advance(&self, time: Duration) {
        self.clock.sleep_until(self.clock.now() + time).await;
    }
}

/// Delays every message, so that a call takes many polls.
fn slow() -> Passage {
    Passage { request: Leg::Delay(ms(7)), reply: Leg::Delay(ms(7)) }
}

#[tokio::test(start_paused = true)]
async fn row_08_a_lock_dropped_at_every_await_point_leaves_nothing() {
    for held in [false, true] {
        for polls in 0.. {
            let world = World::new();
            let (simba, switch) = world.handle();
            switch.set(slow());
            let guard = if held { simba.locker(NAME).try_lock().await.unwrap() } else { None };
            let locker = simba.locker(NAME);
            let mut lock = Box::pin(locker.lock());
            let mut ended = false;
            for _ in 0..polls {
                ended |= lock.as_mut().now_or_never().is_some();
                world.advance(ms(2)).await;
            }
            drop(lock);
            drop(guard);
            // Without a shutdown: the drop alone must clean up.
            world.advance(ms(300)).await;
            world.assert_empty().await;
            if ended || polls > 60 {
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn row_10_ten_thousand_random_starts_and_stops_leave_nothing() {
    let world = World::new();
    let mut random = fastrand::Rng::with_seed(10);
    let (simba, _) = world.handle();
    let contentions = [simba.contend(NAME), simba.contend(NAME), simba.contend(NAME)];
    for _ in 0..10_000 {
        let contention = random.choice(&contentions).unwrap();
        match random.u8(..6) {
            0..=2 => contention.start().unwrap(),
            3 => drop(contention.stop().now_or_never()),
            4 => contention.stop().await.unwrap(),
            _ => contention.step_down(ms(random.u64(..20))),
        }
        let valid = contentions.iter().filter(|contention| contention.is_owner()).count();
        assert!(valid <= 1, "{valid} hold at once");
        if random.u8(..4) == 0 {
            world.advance(ms(random.u64(..30))).await;
        }
    }
    for contention in &contentions {
        contention.stop().await.unwrap();
    }
    world.assert_empty().await;
    simba.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn row_13_one_failure_at_every_renewal_causes_no_loss() {
    let world = World::new();
    let (simba, switch) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    for _ in 0..100 {
        let calls = switch.count(Call::Contend);
        switch.once(Call::Contend, Passage::fail(ErrorKind::Unavailable));
        while switch.count(Call::Contend) < calls + 2 {
            world.advance(ms(5)).await;
            assert!(guard.is_held() && !guard.tenure().is_expiring());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn row_14_an_outage_of_half_the_transition_causes_no_loss() {
    for fault in [Passage::HANG, Passage::REPLY_LOST, Passage::fail(ErrorKind::Unavailable)] {
        let world = World::new();
        let (simba, switch) = world.handle();
        let rival = world.handle().0.contend(NAME);
        let guard = simba.locker(NAME).lock().await.unwrap();
        rival.start().unwrap();
        for round in 0..20 {
            world.advance(ms(137 * round % 700)).await;
            switch.set(fault);
            world.advance(ms(200)).await;
            switch.clear();
            world.advance(ms(500)).await;
            assert!(guard.is_held() && !rival.is_owner(), "{fault:?}, round {round}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn row_18_an_acquisition_that_arrives_after_the_stop_is_undone_and_never_renewed() {
    for late in [10, 100, 400, 900, 5_000] {
        let world = World::new();
        let (simba, switch) = world.handle();
        switch.once(Call::Contend, Passage { request: Leg::Delay(ms(late)), reply: Leg::Pass });
        let contention = simba.contend(NAME);
        contention.start().unwrap();
        world.advance(ms(5)).await;
        contention.stop().await.unwrap();
        if ms(late) < lease().ttl() / 3 {
            // The stop has waited for the call, and released what it acquired.
            world.assert_empty().await;
        }
        world.advance(ms(late) + TOTAL).await;
        world.assert_empty().await;
        assert!(switch.count(Call::Contend) <= 2, "a stopped contention does not renew");
    }
}

#[tokio::test(start_paused = true)]
async fn row_19_a_renewal_in_flight_does_not_outlive_the_release() {
    // All orders of the renewal's request and reply and of the release.
    for request in (0..=150).step_by(15) {
        for reply in (0..=150).step_by(30) {
            for release_at in (0..=320).step_by(40) {
                let world = World::new();
                let (simba, switch) = world.handle();
                let guard = simba.locker(NAME).lock().await.unwrap();
                let legs = Passage { request: Leg::Delay(ms(request)), reply: Leg::Delay(ms(reply)) };
                switch.once(Call::Contend, legs);
                world.advance(ms(355 + release_at)).await;
                guard.release().await.unwrap();
                world.advance(ms(400)).await;
                world.assert_empty().await;
            }
        }
    }
}

/// Loses every hint.
#[derive(Debug)]
struct LosesHints;

impl Weather for LosesHints {
    fn passage(&self, call: Call) -> Passage {
        if call == Call::Hint { Passage::HANG } else { Passage::CLEAR }
    }
}

#[tokio::test(start_paused = true)]
async fn row_21_without_any_wake_up_the_poll_hands_over() {
    for phase in 0..20 {
        let world = World::new();
        let guard = world.handle().0.locker(NAME).lock().await.unwrap();
        let waiter = world.simba(Arc::new(LosesHints)).locker(NAME);
        let mut waiting = pin!(waiter.lock());
        assert!(waiting.as_mut().now_or_never().is_none());
        world.advance(ms(3_000 + 70 * phase)).await;
        guard.release().await.unwrap();
        let released = world.clock.now();
        drop(waiting.await.unwrap());
        let took = world.clock.now() - released;
        assert!(took <= lease().poll() + ms(1), "in phase {phase} after {took:?}");
    }
}

/// Forges a hint every millisecond, delays and repeats the real ones.
#[derive(Debug)]
struct ForgesHints;

impl Weather for ForgesHints {
    fn passage(&self, call: Call) -> Passage {
        let request = if call == Call::Hint { Leg::Delay(ms(130)) } else { Leg::Pass };
        Passage { request, reply: Leg::Pass }
    }

    fn forged_hint(&self) -> Option<Duration> {
        Some(ms(1))
    }
}

#[tokio::test(start_paused = true)]
async fn row_22_late_repeated_and_forged_hints_do_not_affect_a_hold() {
    let world = World::new();
    let simba = world.simba(Arc::new(ForgesHints));
    let guard = simba.locker(NAME).lock().await.unwrap();
    let rival = simba.contend(NAME);
    rival.start().unwrap();
    for _ in 0..200 {
        world.advance(ms(50)).await;
        assert!(guard.is_held() && !rival.is_owner());
    }
    guard.release().await.unwrap();
    rival.acquired().await.unwrap();
    rival.stop().await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn row_43_a_store_whose_clock_jumps_ahead_gives_greater_tokens_and_recovers() {
    for _ in 0..10 {
        let world = World::new();
        let first = world.handle().0.locker(NAME).lock().await.unwrap();
        let waiter = world.handle().0.locker(NAME);
        // For the store, every lease has expired an hour too early. That breaks exclusion, and is documented.
        world.store_clock.jump(Duration::from_secs(3_600));
        let second = waiter.lock().await.unwrap();
        assert!(second.token() > first.token(), "the token does not grow");
        let loss = first.lost().await;
        assert!(matches!(loss, Loss::TakenBy(_)), "{loss}: not detected at the next renewal");
        assert!(second.is_held());
        let token = second.token();
        second.release().await.unwrap();
        let third = world.handle().0.locker(NAME).lock().await.unwrap();
        assert!(third.token() > token && third.is_held(), "not recovered");
    }
}

#[tokio::test(start_paused = true)]
async fn row_47_clocks_one_percent_apart_keep_exclusion() {
    for rate in [0.99, 0.995, 1.0, 1.005, 1.01] {
        let world = World::new();
        let clock = SkewedClock::with_rate(world.clock.clone(), rate);
        let switch = Switch::new();
        let weather: Arc<dyn Weather> = Arc::<Switch>::clone(&switch);
        let backend = FaultyBackend::new(world.store.clone(), world.clock.clone(), weather);
        let simba = Simba::builder(Arc::new(backend)).with_clock(clock.clone()).with_lease(lease()).build();
        let guard = simba.locker(NAME).lock().await.unwrap();
        let rival = world.handle().0.contend(NAME);
        rival.start().unwrap();
        switch.set(Passage::HANG);
        guard.lost().await;
        assert!(!rival.is_owner(), "at rate {rate}: the holder's own clock did not end it first");
        rival.acquired().await.unwrap();
        assert!(!guard.is_held());
    }
}

#[test]
fn row_59_poison_ids_and_messages_are_refused_or_harmless() {
    let mut random = fastrand::Rng::with_seed(59);
    let pieces = ["@", "@@", "\0", "a", "é", "\u{202e}", "{", "}", "released@@", "x", " ", "\n", "9"];
    let mut accepted = 0;
    for _ in 0..10_000 {
        let length = if random.u8(..100) == 0 { 100_000 } else { random.usize(..40) };
        let text: String = (0..length).map(|_| *random.choice(&pieces).unwrap()).collect();
        if let Ok(id) = ContenderId::new(&text) {
            accepted += 1;
            assert!(!id.as_str().contains("@@") && !id.as_str().ends_with('@') && id.as_str().len() <= 32);
        }
        if let Ok(id) = ContenderId::foreign(&text) {
            let _ = (id.host(), id.pid(), id.to_string());
        }
    }
    assert!(accepted > 0, "no valid id");
}

#[tokio::test(start_paused = true)]
async fn row_62_a_leader_that_loses_its_lease_in_mid_work_starts_no_tick() {
    let world = World::new();
    let (simba, switch) = world.handle();
    let ticks = Arc::new(std::sync::Mutex::new(Vec::<(Moment, bool)>::new()));
    let (recorded, clock) = (Arc::clone(&ticks), world.clock.clone());
    let job = simba
        .scheduler(NAME)
        .start(Schedule::fixed_rate(ms(50)).unwrap(), move |tenure: Tenure| {
            recorded.lock().unwrap().push((clock.now(), tenure.is_held() && !tenure.is_expiring()));
            let clock = clock.clone();
            async move {
                // Does not watch for `expiring`.
                clock.sleep_until(clock.now() + ms(170)).await;
                Ok::<(), std::convert::Infallible>(())
            }
        })
        .unwrap();
    let tenure = job.acquired().await.unwrap();
    switch.set(Passage::HANG);
    assert_eq!(tenure.lost().await, Loss::Deadline);
    let lost = world.clock.now();
    assert!(lost - Moment::ZERO <= DEADLINE + ms(1));
    world.advance(TOTAL * 3).await;
    let ticks = ticks.lock().unwrap().clone();
    assert!(ticks.iter().all(|(at, valid)| *valid && *at < lost), "{ticks:?}");
}

/// Rows 8, 19, 21, 47 and 62 combined: a part of the seeds that the simulation runs.
#[test]
fn combined_rows_violate_no_rule() {
    for seed in 0..60 {
        let outcome = run(Plan::new(seed, Scale::default()));
        assert!(outcome.violations.is_empty(), "{}", outcome.timeline());
    }
}

/// In this seed, a callback of a killed process is called while another process holds the mutex.
#[test]
fn a_killed_process_records_only_the_end_of_its_tenure() {
    let outcome = run(Plan::new(10_187_608, Scale::default()));
    assert!(outcome.violations.is_empty(), "{}", outcome.timeline());
    let events = outcome.history.events();
    let crashes = events.iter().enumerate().filter(|(_, event)| event.what == What::Crashed);
    let mut count = 0;
    for (at, crash) in crashes {
        let prefix = format!("{}/", crash.who);
        let later = events[at..].iter().filter(|event| event.who.starts_with(&prefix));
        later.for_each(|event| assert!(matches!(event.what, What::Lost { .. }), "{event:?}"));
        count += 1;
    }
    assert!(count > 0);
}
