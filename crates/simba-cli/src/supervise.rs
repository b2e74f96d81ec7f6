//! Runs a command under a tenure, from its start until none of its processes is left.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use simba_mutex::clock::Clock as _;
use simba_mutex::{Lease, Moment, SystemClock, Tenure};

use crate::failure::exit_with_leftover_processes;
use crate::guard::handle::GuardHandle;
use crate::guard::protocol::{Order, Report};
use crate::guard::tree::own_group;
use crate::signals::{self, Signals};
use crate::terminal::Terminal;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The command exited with this code.
    Code(i32),
    /// A signal that `simba` did not send ended the command.
    Signal(i32),
    /// `simba` ended the command: the mutex was lost, or was about to be lost.
    Lost,
    /// `simba` ended the command: its guard was killed or hangs, so the deadline was not enforced.
    Unguarded,
    /// Processes are left that cannot be killed: the mutex must not be freed.
    Unclean,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "it exited with {code}"),
            Self::Signal(signal) => write!(f, "it was ended by {}", signals::name(*signal)),
            Self::Lost => f.write_str("the mutex was lost"),
            Self::Unguarded => f.write_str("its guard was killed or hangs"),
            Self::Unclean => f.write_str("it left processes that cannot be killed"),
        }
    }
}

/// Time limit for the guard's kill once the mutex is lost.
const KILL_LIMIT: Duration = Duration::from_millis(250);

/// The shortest time between two checks for a renewal.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// A command and the tenure under which it runs.
pub(crate) struct Job<'a> {
    pub(crate) command: &'a [OsString],
    pub(crate) tenure: &'a Tenure,
    /// How often to check for a renewal while there is time left.
    pub(crate) check_interval: Duration,
    pub(crate) terminal: Terminal,
}

/// The state of a running command.
struct State {
    guard: GuardHandle,
    ended: Option<Ended>,
    group: Option<Pid>,
    /// The last order with deadlines; none once the command was asked to end.
    until: Option<Order>,
    /// When a guard that does not report is treated as dead.
    guard_limit: Option<Moment>,
    killed: bool,
    /// The guard does not read its orders any more.
    guard_hangs: bool,
    /// When to check for a renewal. Kept across events, so that a flood of signals does not postpone it.
    check_at: Moment,
}

impl State {
    /// Sends an order. A guard that does not accept it counts as dead.
    fn order(&mut self, order: Order) {
        self.guard_hangs |= !self.guard.order(order);
    }
}

impl<'a> Job<'a> {
    pub(crate) fn new(command: &'a [OsString], tenure: &'a Tenure, lease: Lease) -> Self {
        let check_interval = lease.renew_at() / 8;
        Self { command, tenure, check_interval, terminal: Terminal::find() }
    }

    /// Runs the command until none of its processes is left. Passes signals on.
    ///
    /// # Cancel safety
    ///
    /// A dropped call ends the command, and returns once none of its processes is left.
    pub(crate) async fn run(&self, signals: &mut Signals) -> io::Result<Ended> {
        let (end, until) = self.until();
        let foreground = if self.terminal.is_ours() { own_group() } else { None };
        let guard = GuardHandle::start(self.command, &self.env(), foreground, until)?;
        let mut state = State {
            guard,
            ended: None,
            group: None,
            until: Some(until),
            guard_limit: None,
            killed: false,
            guard_hangs: false,
            check_at: next_check(SystemClock.now(), end, self.check_interval),
        };
        loop {
            let ending = state.until.is_none();
            if state.guard_hangs {
                return Ok(self.kill_directly(state, if ending { Ended::Lost } else { Ended::Unguarded }));
            }
            tokio::select! {
                biased;
                // Deadlines come first, each once: reports and signals cannot delay them. Once the mutex is lost,
                // both are ready at the first poll of an iteration.
                _ = self.tenure.lost(), if !state.killed => self.kill(&mut state),
                () = self.tenure.expiring(), if !ending => self.end(&mut state),
                () = SystemClock.sleep_until(state.check_at), if !ending => self.send_deadlines(&mut state),
                // Before the reports: a signal that arrived before the end of the command is for the command.
                signal = signals.next() => state.order(Order::Signal(signal)),
                report = state.guard.report() => match report {
                    Some(Report::Failed(errno)) => {
                        state.guard.wait_for_exit().await;
                        return Err(io::Error::from_raw_os_error(errno));
                    }
                    Some(Report::Clean { overdue }) => {
                        self.take_terminal(&state);
                        state.guard.wait_for_exit().await;
                        return Ok(state.ended.filter(|_| !overdue).unwrap_or(Ended::Lost));
                    }
                    Some(Report::Unclean) => {
                        self.take_terminal(&state);
                        state.guard.abandon();
                        return Ok(Ended::Unclean);
                    }
                    Some(report) => self.handle_report(report, &mut state),
                    // The guard itself is gone.
                    None => return Ok(self.kill_directly(state, Ended::Unguarded)),
                },
                () = sleep_until(state.guard_limit) => return Ok(self.kill_directly(state, Ended::Lost)),
            }
        }
    }

    /// Runs the command like [`run`](Self::run), for callers that free the mutex right afterwards. If processes are
    /// left, exits this process without a release: the mutex is freed when its lease ends.
    pub(crate) async fn run_or_exit(&self, signals: &mut Signals) -> io::Result<Ended> {
        let ended = self.run(signals).await?;
        if ended == Ended::Unclean {
            exit_with_leftover_processes();
        }
        Ok(ended)
    }

    fn handle_report(&self, report: Report, state: &mut State) {
        match report {
            Report::Started(pid) => {
                state.group = Pid::from_raw(pid);
                if let Some(group) = state.group {
                    self.terminal.give(group);
                }
            }
            Report::Stopped => self.suspend(state),
            Report::Exited(code) => state.ended = Some(Ended::Code(code)),
            Report::Signaled(signal) => state.ended = Some(Ended::Signal(signal)),
            Report::Failed(_) | Report::Clean { .. } | Report::Unclean => {}
        }
    }

    /// Sends new deadlines to the guard after a renewal.
    fn send_deadlines(&self, state: &mut State) {
        let (end, until) = self.until();
        state.check_at = next_check(SystemClock.now(), end, self.check_interval);
        if state.until != Some(until) {
            state.until = Some(until);
            state.order(until);
        }
    }

    /// Asks the command to end while there is time left.
    fn end(&self, state: &mut State) {
        state.until = None;
        let (end, deadline) = self.tenure.ends_at();
        state.guard_limit = Some(deadline.saturating_sub((deadline - end) / 8 * 3));
        state.order(Order::End);
    }

    /// Kills the command at once, because another may hold the mutex already.
    fn kill(&self, state: &mut State) {
        state.until = None;
        state.killed = true;
        state.guard_limit = Some(SystemClock.now() + KILL_LIMIT);
        state.order(Order::Kill);
    }

    /// Kills the command without the guard, which is dead or hangs.
    fn kill_directly(&self, state: State, why: Ended) -> Ended {
        let (group, guard) = (state.group, state.guard);
        let clean = guard.kill_tree();
        if let Some(group) = group {
            self.terminal.take(group);
        }
        match (clean, self.tenure.is_held()) {
            (false, _) => Ended::Unclean,
            (true, false) => Ended::Lost,
            (true, true) => why,
        }
    }

    /// Returns when the command gets TERM, and the order with its current deadlines. Half of the grace is for the
    /// command, a quarter for the kill; the rest is spare. The grace is that of the tenure: a store may grant less time
    /// than requested, which the whole grace of the lease could exceed.
    fn until(&self) -> (Moment, Order) {
        let (end, deadline) = self.tenure.ends_at();
        (end, Order::Until { end, kill: deadline.saturating_sub((deadline - end) / 2) })
    }

    fn env(&self) -> [(&'static str, String); 3] {
        [
            ("SIMBA_MUTEX", self.tenure.mutex().to_string()),
            ("SIMBA_CONTENDER_ID", self.tenure.contender().to_string()),
            ("SIMBA_FENCING_TOKEN", self.tenure.token().get().to_string()),
        ]
    }

    fn take_terminal(&self, state: &State) {
        if let Some(group) = state.group {
            self.terminal.take(group);
        }
    }

    /// Suspends `simba` together with the command, as a shell expects of a job. The lease is not renewed meanwhile.
    fn suspend(&self, state: &mut State) {
        let Some(group) = state.group else { return };
        let had = self.terminal.group() == Some(group);
        self.take_terminal(state);
        let suspended = self.terminal.suspend();
        self.terminal.give(group);
        // Without a shell that could resume this job, the key has no effect; a background command that wants to read
        // stays stopped.
        if suspended || had {
            state.order(Order::Signal(Signal::CONT.as_raw()));
        }
    }
}

/// Returns when to check for a renewal again. The closer `end` is, the shorter the interval: the guard must receive the
/// new deadlines before it ends the command.
fn next_check(now: Moment, end: Moment, interval: Duration) -> Moment {
    now + interval.min(end.saturating_since(now) / 4).max(MIN_CHECK_INTERVAL)
}

async fn sleep_until(moment: Option<Moment>) {
    match moment {
        Some(moment) => SystemClock.sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewal_shortly_before_the_end_is_passed_on_in_time() {
        for lease in
            [Lease::default(), Lease::new(Duration::from_secs(1), Duration::from_millis(500)).unwrap()]
        {
            let interval = lease.renew_at() / 8;
            let end = Moment::ZERO + lease.total().saturating_sub(lease.grace());
            let (mut last, mut checks) = (Moment::ZERO, 0);
            loop {
                let next = next_check(last, end, interval);
                if next >= end {
                    break;
                }
                (last, checks) = (next, checks + 1);
            }
            assert!(end - last <= MIN_CHECK_INTERVAL, "the last check is {:?} before the end", end - last);
            assert!(checks < 100, "{checks} checks");
        }
    }
}
