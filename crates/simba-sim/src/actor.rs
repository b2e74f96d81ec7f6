//! What a process does with the mutex.

use std::convert::Infallible;
use std::time::Duration;

use fastrand::Rng;
use simba_core::{Clock, Contender, Guard, Loss, MutexState, Schedule, Tenure};
use simba_tck::What;

use crate::node::Seat;
use crate::plan::Role;
use crate::world::MUTEX;

pub(crate) async fn act(seat: Seat, role: Role, mut random: Rng) {
    for round in 0u32.. {
        let who = format!("{}/{round}", seat.name);
        match role {
            Role::Leader => lead(&seat, &who, &mut random).await,
            Role::Locker => lock(&seat, &who, &mut random).await,
            Role::Impatient => hurry(&seat, &who, &mut random).await,
            Role::Scheduler => schedule(&seat, &who, &mut random).await,
            Role::Callback => call_back(&seat, &who, &mut random).await,
        }
        seat.sleep(ms(&mut random, 1, 200)).await;
    }
}

fn ms(random: &mut Rng, from: u64, to: u64) -> Duration {
    Duration::from_millis(random.u64(from..to))
}

fn label(who: &str) -> String {
    who.replace('/', "-")
}

/// Contends for a while, works in every tenure, and stops in order or by being dropped.
async fn lead(seat: &Seat, who: &str, random: &mut Rng) {
    let contention = seat.simba.contend(MUTEX).with_initial_delay(ms(random, 0, 50));
    if contention.start().is_err() {
        return;
    }
    let end = ms(random, 100, 8_000);
    let work = async {
        while let Ok(tenure) = contention.acquired().await {
            seat.hold(who, &tenure);
            let plan = Work::plan(random);
            let steps_down = plan.stubborn && plan.length < Duration::from_millis(300);
            let _ = plan.under(seat, who, &tenure).await;
            if steps_down {
                contention.step_down(Duration::from_millis(700));
            }
            tenure.lost().await;
            seat.sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        () = seat.sleep(end) => {}
    }
    // The work above is dropped by now; what is under way elsewhere is waited for by the stop.
    let _ = contention.stop().await;
}

/// Leads through callbacks: works from one to the other, and takes its time to stop.
async fn call_back(seat: &Seat, who: &str, random: &mut Rng) {
    let caller = Caller { seat: seat.clone(), who: who.to_owned(), slow: ms(random, 0, 150) };
    let contention = seat.simba.contend(MUTEX).with_contender(caller);
    if contention.start().is_err() {
        return;
    }
    seat.sleep(ms(random, 100, 8_000)).await;
    let _ = contention.stop().await;
}

struct Caller {
    seat: Seat,
    who: String,
    slow: Duration,
}

impl Contender for Caller {
    async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
        self.seat.hold(&self.who, tenure);
        self.seat.record(&self.who, What::WorkStarted { token: tenure.token() });
    }

    /// A graceful end waits for this, until the deadline; a loss does not.
    async fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
        if matches!(tenure.loss(), None | Some(Loss::Released | Loss::SteppedDown)) {
            let clock = &self.seat.clock;
            // Timers may be a millisecond late.
            let end = tenure.deadline().saturating_sub(Duration::from_millis(5));
            clock.sleep_until((clock.now() + self.slow).min(end)).await;
        }
        self.seat.record(&self.who, What::WorkEnded);
    }
}

/// Waits for the mutex, works, and gives it back in one way or another.
async fn lock(seat: &Seat, who: &str, random: &mut Rng) {
    let locker = seat.simba.locker(MUTEX).with_label(label(who));
    if let Ok(guard) = locker.lock().await {
        use_guard(seat, who, guard, random).await;
    }
}

/// Tries, waits with limits, and drops what it waits for.
async fn hurry(seat: &Seat, who: &str, random: &mut Rng) {
    let locker = seat.simba.locker(MUTEX).with_label(label(who));
    let patience = ms(random, 0, 1_500);
    let guard = match random.u8(..3) {
        0 => locker.try_lock().await.ok().flatten(),
        1 => locker.lock_timeout(patience).await.ok(),
        _ => tokio::select! {
            biased;
            guard = locker.lock() => guard.ok(),
            () = seat.sleep(patience) => None,
        },
    };
    if let Some(guard) = guard {
        use_guard(seat, who, guard, random).await;
    }
}

async fn use_guard(seat: &Seat, who: &str, guard: Guard, random: &mut Rng) {
    seat.hold(who, &guard.tenure());
    let _ = Work::plan(random).under(seat, who, &guard.tenure()).await;
    match random.u8(..4) {
        0 => drop(guard),
        1 => {
            tokio::select! {
                biased;
                _ = guard.lost() => {}
                () = seat.sleep(ms(random, 0, 2_000)) => {}
            }
        }
        _ => drop(guard.release().await),
    }
}

/// Runs a job on schedule.
async fn schedule(seat: &Seat, who: &str, random: &mut Rng) {
    let period = ms(random, 20, 400);
    let every = Schedule::fixed_rate(period).expect("a period in range");
    let length = ms(random, 1, 300);
    let (pen, name) = (seat.clone(), who.to_owned());
    let job = move |tenure: Tenure| {
        let (seat, who) = (pen.clone(), name.clone());
        async move {
            seat.hold(&who, &tenure);
            seat.record(&who, What::Tick { token: tenure.token(), period });
            let _written = Written::start(&seat, &who, &tenure);
            seat.sleep(length).await;
            Ok::<(), Infallible>(())
        }
    };
    let Ok(job) = seat.simba.scheduler(MUTEX).start(every, job) else { return };
    let watch = async {
        while let Ok(tenure) = job.acquired().await {
            seat.hold(who, &tenure);
            tenure.lost().await;
            seat.sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        () = watch => {}
        () = seat.sleep(ms(random, 100, 8_000)) => {}
    }
    let _ = job.stop().await;
}

/// Work under the mutex.
struct Work {
    length: Duration,
    /// Goes on when it is told to stop.
    stubborn: bool,
}

impl Work {
    fn plan(random: &mut Rng) -> Self {
        let length = if random.u8(..4) > 0 { ms(random, 0, 300) } else { ms(random, 0, 5_000) };
        Self { length, stubborn: random.bool() }
    }

    async fn under(&self, seat: &Seat, who: &str, tenure: &Tenure) -> simba_core::Result<()> {
        tenure
            .run(async {
                let _written = Written::start(seat, who, tenure);
                tokio::select! {
                    biased;
                    () = tenure.expiring(), if !self.stubborn => {}
                    () = seat.sleep(self.length) => {}
                }
            })
            .await
    }
}

/// Work that is written down, from its start to its end however it ends.
struct Written<'a> {
    seat: &'a Seat,
    who: &'a str,
}

impl<'a> Written<'a> {
    fn start(seat: &'a Seat, who: &'a str, tenure: &Tenure) -> Self {
        seat.record(who, What::WorkStarted { token: tenure.token() });
        Self { seat, who }
    }
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        self.seat.record(self.who, What::WorkEnded);
    }
}
