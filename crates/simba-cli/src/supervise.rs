//! A command under a tenure, from its start until nothing of it is left.

use std::ffi::OsString;
use std::io;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use simba_mutex::clock::Clock as _;
use simba_mutex::{Lease, Moment, SystemClock, Tenure};

use crate::failure::{code, say};
use crate::guard::tree::own_group;
use crate::guard::warden::Warden;
use crate::guard::wire::{Order, Report};
use crate::signals::Signals;
use crate::terminal::Terminal;

/// How a command came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// By itself, with this code.
    Code(i32),
    /// By a signal that was not ours.
    Signal(i32),
    /// By us: the mutex was lost, or was about to be.
    Lost,
    /// By us: its guard was killed or hangs, and nobody would have ended it in time.
    Unguarded,
    /// Something of it is left that cannot be ended: the mutex must not be freed.
    Unclean,
}

/// How long a guard may take to kill when there is no time left.
const AT_ONCE: Duration = Duration::from_millis(250);

/// What runs, and for whom.
pub(crate) struct Job<'a> {
    pub(crate) command: &'a [OsString],
    pub(crate) tenure: &'a Tenure,
    /// How long before the deadline the command is told to end.
    pub(crate) grace: Duration,
    /// How often to look for a renewal.
    pub(crate) pace: Duration,
    pub(crate) terminal: Terminal,
}

/// How far it has come.
struct Course {
    warden: Warden,
    ended: Option<Ended>,
    group: Option<Pid>,
    /// The last order about time, or none once the command was told to end.
    until: Option<Order>,
    /// When a guard that says nothing is given up.
    hung: Option<Moment>,
    killed: bool,
    /// The guard does not read its orders any more.
    guard_hangs: bool,
    /// When to look for a renewal. Kept across events: a flood of signals must not push it back.
    tell_at: Moment,
}

impl Course {
    /// Sends an order. A guard that does not take it counts as dead.
    fn order(&mut self, order: Order) {
        self.guard_hangs |= !self.warden.order(order);
    }
}

impl<'a> Job<'a> {
    pub(crate) fn new(command: &'a [OsString], tenure: &'a Tenure, lease: Lease) -> Self {
        let pace = (lease.renew_at() / 8).max(Duration::from_millis(5));
        Self { command, tenure, grace: lease.grace(), pace, terminal: Terminal::find() }
    }

    /// A tenure that may not last longer than this has a shorter grace.
    pub(crate) fn with_max_hold(mut self, most: Option<Duration>) -> Self {
        self.grace = most.map_or(self.grace, |most| self.grace.min(most / 4));
        self
    }

    /// Runs the command until nothing of it is left, passing signals on.
    ///
    /// # Cancel safety
    ///
    /// A dropped call ends the command, and comes back once nothing of it is left.
    pub(crate) async fn run(&self, signals: &mut Signals) -> io::Result<Ended> {
        let until = self.until();
        let foreground = if self.terminal.is_ours() { own_group() } else { None };
        let warden = Warden::start(self.command, &self.env(), foreground, until)?;
        let mut course = Course {
            warden,
            ended: None,
            group: None,
            until: Some(until),
            hung: None,
            killed: false,
            guard_hangs: false,
            tell_at: SystemClock.now() + self.pace,
        };
        loop {
            let told = course.until.is_none();
            if course.guard_hangs {
                return Ok(self.cut_down(course, if told { Ended::Lost } else { Ended::Unguarded }));
            }
            tokio::select! {
                biased;
                // What is about time comes first, each once: neither reports nor signals can delay it. Once the mutex is
                // lost, both are ready at the first poll of a turn.
                _ = self.tenure.lost(), if !course.killed => self.kill(&mut course),
                () = self.tenure.expiring(), if !told => self.end(&mut course),
                report = course.warden.report() => match report {
                    Some(Report::Failed(errno)) => {
                        course.warden.dismiss().await;
                        return Err(io::Error::from_raw_os_error(errno));
                    }
                    Some(Report::Clean { overdue }) => {
                        self.take_terminal(&course);
                        course.warden.dismiss().await;
                        return Ok(course.ended.filter(|_| !overdue).unwrap_or(Ended::Lost));
                    }
                    Some(Report::Unclean) => {
                        self.take_terminal(&course);
                        course.warden.give_up();
                        return Ok(Ended::Unclean);
                    }
                    Some(report) => self.heard(report, &mut course),
                    // The guard itself is gone.
                    None => return Ok(self.cut_down(course, Ended::Unguarded)),
                },
                () = sleep_until(course.hung) => return Ok(self.cut_down(course, Ended::Lost)),
                () = SystemClock.sleep_until(course.tell_at), if !told => self.tell_time(&mut course),
                signal = signals.next() => course.order(Order::Signal(signal)),
            }
        }
    }

    /// As [`run`](Self::run), for who frees the mutex as soon as this is over: if something is left of the
    /// command, this process ends as it stands, and the mutex with its lease.
    pub(crate) async fn run_or_exit(&self, signals: &mut Signals) -> io::Result<Ended> {
        let ended = self.run(signals).await?;
        if ended == Ended::Unclean {
            say("the command left processes behind that cannot be ended: the mutex ends with its lease");
            std::process::exit(code::LOST.into());
        }
        Ok(ended)
    }

    fn heard(&self, report: Report, course: &mut Course) {
        match report {
            Report::Started(pid) => {
                course.group = Pid::from_raw(pid);
                if let Some(group) = course.group {
                    self.terminal.give(group);
                }
            }
            Report::Stopped => self.stand_still(course),
            Report::Exited(code) => course.ended = Some(Ended::Code(code)),
            Report::Signaled(signal) => course.ended = Some(Ended::Signal(signal)),
            Report::Failed(_) | Report::Clean { .. } | Report::Unclean => {}
        }
    }

    /// Passes a renewal on.
    fn tell_time(&self, course: &mut Course) {
        course.tell_at = SystemClock.now() + self.pace;
        let until = self.until();
        if course.until != Some(until) {
            course.until = Some(until);
            course.order(until);
        }
    }

    /// There is time left to end in order.
    fn end(&self, course: &mut Course) {
        course.until = None;
        course.hung = Some(self.tenure.deadline().saturating_sub(self.grace / 8 * 3));
        course.order(Order::End);
    }

    /// Another may hold the mutex already.
    fn kill(&self, course: &mut Course) {
        course.until = None;
        course.killed = true;
        course.hung = Some(SystemClock.now() + AT_ONCE);
        course.order(Order::Kill);
    }

    /// Does what the guard cannot do any more.
    fn cut_down(&self, course: Course, why: Ended) -> Ended {
        let (group, warden) = (course.group, course.warden);
        let clean = warden.clean_up();
        if let Some(group) = group {
            self.terminal.take(group);
        }
        match (clean, self.tenure.is_held()) {
            (false, _) => Ended::Unclean,
            (true, false) => Ended::Lost,
            (true, true) => why,
        }
    }

    /// Until when the command may run as things stand. Half of the grace is for it, a quarter for the killing;
    /// what is left is spare.
    fn until(&self) -> Order {
        let deadline = self.tenure.deadline();
        Order::Until {
            end: deadline.saturating_sub(self.grace),
            kill: deadline.saturating_sub(self.grace / 2),
        }
    }

    fn env(&self) -> [(&'static str, String); 3] {
        [
            ("SIMBA_MUTEX", self.tenure.mutex().to_string()),
            ("SIMBA_CONTENDER_ID", self.tenure.contender().to_string()),
            ("SIMBA_FENCING_TOKEN", self.tenure.token().get().to_string()),
        ]
    }

    fn take_terminal(&self, course: &Course) {
        if let Some(group) = course.group {
            self.terminal.take(group);
        }
    }

    /// Stands still with the command, as a shell expects of a job. The lease is not renewed meanwhile.
    fn stand_still(&self, course: &mut Course) {
        let Some(group) = course.group else { return };
        let had = self.terminal.group() == Some(group);
        self.take_terminal(course);
        let stood_still = self.terminal.stand_still();
        self.terminal.give(group);
        // Where nobody could have told us to go on, the keys do nothing, and a command in the background that
        // wants to read stays where it is.
        if stood_still || had {
            course.order(Order::Signal(Signal::CONT.as_raw()));
        }
    }
}

async fn sleep_until(moment: Option<Moment>) {
    match moment {
        Some(moment) => SystemClock.sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
