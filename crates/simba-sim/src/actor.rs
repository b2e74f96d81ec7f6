//! The actions of a process on the mutex.

use std::convert::Infallible;
use std::time::Duration;

use fastrand::Rng;
use simba_core::{Clock, Contender, Guard, Loss, MutexState, Schedule, Tenure};
use simba_tck::What;

use crate::node::Context;
use crate::plan::Role;
use crate::world::MUTEX;

/// Contends in the role, round after round, until the process is killed.
pub(crate) async fn act(context: Context, role: Role, mut random: Rng) {
    for round in 0u32.. {
        let who = format!("{}/{round}", context.name);
        match role {
            Role::Leader => lead(&context, &who, &mut random).await,
            Role::Locker => lock(&context, &who, &mut random).await,
            Role::TimeLimited => try_with_limits(&context, &who, &mut random).await,
            Role::Scheduler => schedule(&context, &who, &mut random).await,
            Role::Callback => lead_with_callbacks(&context, &who, &mut random).await,
        }
        context.sleep(ms(&mut random, 1, 200)).await;
    }
}

fn ms(random: &mut Rng, from: u64, to: u64) -> Duration {
    Duration::from_millis(random.u64(from..to))
}

fn label(who: &str) -> String {
    who.replace('/', "-")
}

/// Contends for some time, works in every tenure, and stops gracefully or by a drop.
async fn lead(context: &Context, who: &str, random: &mut Rng) {
    let contention = context.simba.contend(MUTEX).with_initial_delay(ms(random, 0, 50));
    if contention.start().is_err() {
        return;
    }
    let end = ms(random, 100, 8_000);
    let work = async {
        while let Ok(tenure) = contention.acquired().await {
            context.record_tenure(who, &tenure);
            let plan = Work::plan(random);
            let steps_down = plan.ignores_expiring && plan.length < Duration::from_millis(300);
            let _ = plan.under(context, who, &tenure).await;
            if steps_down {
                contention.step_down(Duration::from_millis(700));
            }
            tenure.lost().await;
            context.sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        () = context.sleep(end) => {}
    }
    // The future `work` is dropped by now. The stop waits for work under the tenure.
    let _ = contention.stop().await;
}

/// Leads through callbacks: works from `on_acquired` to `on_released`, and takes some time to stop.
async fn lead_with_callbacks(context: &Context, who: &str, random: &mut Rng) {
    let worker =
        CallbackWorker { context: context.clone(), who: who.to_owned(), stop_time: ms(random, 0, 150) };
    let contention = context.simba.contend(MUTEX).with_contender(worker);
    if contention.start().is_err() {
        return;
    }
    context.sleep(ms(random, 100, 8_000)).await;
    let _ = contention.stop().await;
}

struct CallbackWorker {
    context: Context,
    who: String,
    stop_time: Duration,
}

impl Contender for CallbackWorker {
    async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
        self.context.record_tenure(&self.who, tenure);
        self.context.record(&self.who, What::WorkStarted { token: tenure.token() });
    }

    /// Delays a graceful end, at most until the deadline. A loss is not delayed.
    async fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
        if matches!(tenure.loss(), None | Some(Loss::Released | Loss::SteppedDown)) {
            let clock = &self.context.clock;
            // Timers may be a millisecond late.
            let end = tenure.deadline().saturating_sub(Duration::from_millis(5));
            clock.sleep_until((clock.now() + self.stop_time).min(end)).await;
        }
        self.context.record(&self.who, What::WorkEnded);
    }
}

/// Waits for the mutex, works, and releases it in one of several ways.
async fn lock(context: &Context, who: &str, random: &mut Rng) {
    let locker = context.simba.locker(MUTEX).with_label(label(who));
    if let Ok(guard) = locker.lock().await {
        use_guard(context, who, guard, random).await;
    }
}

/// Tries, waits with limits, and drops pending locks.
async fn try_with_limits(context: &Context, who: &str, random: &mut Rng) {
    let locker = context.simba.locker(MUTEX).with_label(label(who));
    let limit = ms(random, 0, 1_500);
    let guard = match random.u8(..3) {
        0 => locker.try_lock().await.ok().flatten(),
        1 => locker.lock_timeout(limit).await.ok(),
        _ => tokio::select! {
            biased;
            guard = locker.lock() => guard.ok(),
            () = context.sleep(limit) => None,
        },
    };
    if let Some(guard) = guard {
        use_guard(context, who, guard, random).await;
    }
}

async fn use_guard(context: &Context, who: &str, guard: Guard, random: &mut Rng) {
    context.record_tenure(who, &guard.tenure());
    let _ = Work::plan(random).under(context, who, &guard.tenure()).await;
    match random.u8(..4) {
        0 => drop(guard),
        1 => {
            tokio::select! {
                biased;
                _ = guard.lost() => {}
                () = context.sleep(ms(random, 0, 2_000)) => {}
            }
        }
        _ => drop(guard.release().await),
    }
}

/// Runs a job on schedule.
async fn schedule(context: &Context, who: &str, random: &mut Rng) {
    let period = ms(random, 20, 400);
    let every = Schedule::fixed_rate(period).expect("a period in range");
    let length = ms(random, 1, 300);
    let (job_context, name) = (context.clone(), who.to_owned());
    let job = move |tenure: Tenure| {
        let (context, who) = (job_context.clone(), name.clone());
        async move {
            context.record_tenure(&who, &tenure);
            context.record(&who, What::Tick { token: tenure.token(), period });
            let _work = RecordedWork::start(&context, &who, &tenure);
            context.sleep(length).await;
            Ok::<(), Infallible>(())
        }
    };
    let Ok(job) = context.simba.scheduler(MUTEX).start(every, job) else { return };
    let watch = async {
        while let Ok(tenure) = job.acquired().await {
            context.record_tenure(who, &tenure);
            tenure.lost().await;
            context.sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        () = watch => {}
        () = context.sleep(ms(random, 100, 8_000)) => {}
    }
    let _ = job.stop().await;
}

/// Work under the mutex.
struct Work {
    length: Duration,
    /// Continues when it is asked to stop.
    ignores_expiring: bool,
}

impl Work {
    fn plan(random: &mut Rng) -> Self {
        let length = if random.u8(..4) > 0 { ms(random, 0, 300) } else { ms(random, 0, 5_000) };
        Self { length, ignores_expiring: random.bool() }
    }

    async fn under(&self, context: &Context, who: &str, tenure: &Tenure) -> simba_core::Result<()> {
        tenure
            .run(async {
                let _work = RecordedWork::start(context, who, tenure);
                tokio::select! {
                    biased;
                    () = tenure.expiring(), if !self.ignores_expiring => {}
                    () = context.sleep(self.length) => {}
                }
            })
            .await
    }
}

/// Records work, from its start to its end, however it ends.
struct RecordedWork<'a> {
    context: &'a Context,
    who: &'a str,
}

impl<'a> RecordedWork<'a> {
    fn start(context: &'a Context, who: &'a str, tenure: &Tenure) -> Self {
        context.record(who, What::WorkStarted { token: tenure.token() });
        Self { context, who }
    }
}

impl Drop for RecordedWork<'_> {
    fn drop(&mut self) {
        self.context.record(self.who, What::WorkEnded);
    }
}
