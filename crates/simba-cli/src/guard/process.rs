//! The guard process: waits for orders, deadlines and the end of the command, and handles the first that arrives.

use std::ffi::OsString;
use std::io::{self, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal as NixSignal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process_group, set_child_subreaper, wait,
};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use simba_mutex::{Clock, Moment, SystemClock};

use super::protocol::{Order, Report};
use super::tree::{Excluded, kill_all};
use super::{protocol, trampoline};
use crate::terminal::Terminal;

/// The hidden subcommand. Its arguments: the group that gets the terminal back (`0` if the command does not get it),
/// and the command.
pub(crate) const SUBCOMMAND: &str = "__guard";

/// Minimum time limit for the end of killed processes. A busy machine needs seconds for a large tree, and `simba`
/// renews meanwhile.
const REAP_LIMIT: Duration = Duration::from_secs(2);

/// Guards the command. Standard input is the socket to `simba`, which sends the input of the command over it.
pub(crate) fn guard(words: &[OsString]) -> ExitCode {
    // A service manager sends TERM to all processes of a service. The guard ends when the command has ended.
    let _ = SigSet::all().thread_block();
    let _ = rustix::thread::set_name(c"simba-guard");
    // The socket to `simba` may be broken: `simba` detects an error by the end of the reports.
    match Guard::begin(words).and_then(|guard| guard.map_or(Ok(()), Guard::run)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// One command under guard.
struct Guard {
    socket: UnixStream,
    /// Bytes of an incomplete order.
    received: Vec<u8>,
    timer: OwnedFd,
    reaper: Reaper,
    command: Pid,
    end: Moment,
    kill: Moment,
    /// The command was asked to end because a deadline passed.
    overdue: bool,
    /// How the command ended.
    outcome: Option<Report>,
    /// The group that gets the terminal back when the command has ended.
    terminal_group: Option<Pid>,
}

/// Whether the loop continues.
enum Flow {
    Continue,
    /// The command has ended, or must end.
    Finish,
}

impl Guard {
    /// Starts the command, unless its time is up before it could start.
    fn begin(words: &[OsString]) -> io::Result<Option<Self>> {
        let [foreground, command @ ..] = words else { return Err(io::ErrorKind::InvalidInput.into()) };
        // Processes that the command leaves behind become our children, not those of init.
        set_child_subreaper(Some(getpid()))?;
        let socket = UnixStream::from(fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
        let (input, mut received) = receive(&socket)?;
        let Some(Order::Until { end, kill }) = take_order(&mut received) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        if SystemClock.now() >= end {
            report(&socket, Report::Clean { overdue: true });
            return Ok(None);
        }
        let command = match spawn(foreground, command, input) {
            Ok(command) => command,
            Err(error) => {
                report(&socket, Report::Failed(error.raw_os_error().unwrap_or_default()));
                return Ok(None);
            }
        };
        report(&socket, Report::Started(command.as_raw_nonzero().get()));
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Boottime, flags)?;
        let terminal_group = foreground.to_str().and_then(|group| Pid::from_raw(group.parse().ok()?));
        let reaper = Reaper::start()?;
        let guard = Self {
            socket,
            received,
            timer,
            reaper,
            command,
            end,
            kill,
            overdue: false,
            outcome: None,
            terminal_group,
        };
        guard.set_timer()?;
        Ok(Some(guard))
    }

    /// Waits until the command has ended, then kills all that is left of it.
    fn run(mut self) -> io::Result<()> {
        while let Flow::Continue = self.handle_event()? {}
        // Orphans become our children, so the kernel reports when none is left. Until the deadline for KILL they may
        // take longer than `REAP_LIMIT` to end, which a busy machine may need.
        let limit = REAP_LIMIT.max(self.kill.saturating_since(SystemClock.now()));
        let all_ended = kill_all(getpid(), &Excluded::default(), limit, || self.reaper.reap());
        if let Some(group) = self.terminal_group {
            // `simba` may be killed or stopped, and its caller needs the terminal.
            Terminal::find().give_back(self.command, group);
        }
        // The command may have exited just before it was killed. Do not report a stop: `kill_all` stops processes.
        self.read_exits(|_| {});
        // Report last: a report may block while `simba` is stopped, and no process of the command may run meanwhile.
        if let Some(outcome) = self.outcome {
            report(&self.socket, outcome);
        }
        let clean = Report::Clean { overdue: self.overdue };
        report(&self.socket, if all_ended { clean } else { Report::Unclean });
        Ok(())
    }

    fn handle_event(&mut self) -> io::Result<Flow> {
        let [socket, timer, exits] = self.wait()?;
        if timer && let Flow::Finish = self.check_deadlines()? {
            return Ok(Flow::Finish);
        }
        if exits && self.read_exits(report_stop) {
            return Ok(Flow::Finish);
        }
        if socket { self.read_orders() } else { Ok(Flow::Continue) }
    }

    /// Waits until one of socket, timer and reaper is ready. Returns which of them are.
    fn wait(&self) -> io::Result<[bool; 3]> {
        let mut fds = [
            PollFd::new(&self.socket, PollFlags::IN),
            PollFd::new(&self.timer, PollFlags::IN),
            PollFd::new(&self.reaper.changes, PollFlags::IN),
        ];
        while let Err(error) = poll(&mut fds, None) {
            if error != Errno::INTR {
                return Err(error.into());
            }
        }
        Ok(fds.each_ref().map(|fd| !fd.revents().is_empty()))
    }

    // ===== time =====

    /// Sets the timer to the next deadline, on the clock of the leases.
    fn set_timer(&self) -> io::Result<()> {
        let next = if self.overdue { self.kill } else { self.end };
        let at = Timespec::try_from(next - Moment::ZERO).map_err(|_| io::ErrorKind::InvalidInput)?;
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let once = Itimerspec { it_interval: never, it_value: at };
        timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &once)?;
        Ok(())
    }

    fn check_deadlines(&mut self) -> io::Result<Flow> {
        let now = SystemClock.now();
        if now >= self.kill {
            self.overdue = true;
            return Ok(Flow::Finish);
        }
        if now >= self.end && !self.overdue {
            self.overdue = true;
            self.signal(Signal::TERM);
        }
        self.set_timer()?;
        Ok(Flow::Continue)
    }

    /// Signals the command and its group. Resumes stopped processes, so that they handle the signal.
    fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.command, signal);
        if matches!(signal, Signal::TERM | Signal::HUP) {
            let _ = kill_process_group(self.command, Signal::CONT);
        }
    }

    // ===== orders =====

    /// Reads orders from `simba`; if it is gone, the command ends, too.
    fn read_orders(&mut self) -> io::Result<Flow> {
        let mut bytes = [0; 512];
        match self.socket.read(&mut bytes) {
            Ok(0) => return Ok(Flow::Finish),
            Ok(count) => self.received.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Ok(Flow::Finish),
        }
        while let Some(order) = take_order(&mut self.received) {
            if let Flow::Finish = self.execute(order)? {
                return Ok(Flow::Finish);
            }
        }
        Ok(Flow::Continue)
    }

    fn execute(&mut self, order: Order) -> io::Result<Flow> {
        match order {
            // A command that was asked to end gets no new deadlines.
            Order::Until { .. } if self.overdue => {}
            Order::Until { end, kill } => {
                (self.end, self.kill) = (end, kill);
                self.set_timer()?;
            }
            Order::Signal(number) => {
                if let Some(signal) = Signal::from_named_raw(number) {
                    self.signal(signal);
                }
            }
            Order::End => {
                self.end = SystemClock.now();
                return self.check_deadlines();
            }
            Order::Kill => {
                self.overdue = true;
                return Ok(Flow::Finish);
            }
        }
        Ok(Flow::Continue)
    }

    // ===== the command =====

    /// Reads the state of the command; returns whether it has ended. Calls `stopped` if it is stopped.
    fn read_exits(&mut self, stopped: fn(&UnixStream)) -> bool {
        for (pid, status) in self.reaper.take() {
            // The others are orphans of the command, and only had to be reaped.
            if pid != self.command {
                continue;
            }
            match report_of(status) {
                Some(Report::Stopped) => stopped(&self.socket),
                Some(outcome) => self.outcome = Some(outcome),
                None => {}
            }
        }
        self.outcome.is_some()
    }
}

/// Starts the command, on the thread that lives as long as the guard: the command dies with the thread that started it.
fn spawn(foreground: &OsString, command: &[OsString], input: OwnedFd) -> io::Result<Pid> {
    let child = Command::new("/proc/self/exe")
        .arg0("simba")
        .arg(trampoline::SUBCOMMAND)
        .arg(getpid().to_string())
        .arg(foreground)
        .args(command)
        .stdin(Stdio::from(input))
        .process_group(0)
        .spawn()?;
    Ok(Pid::from_child(&child))
}

/// Sends a report. If `simba` is gone, this is detected when orders are read.
fn report(mut socket: &UnixStream, report: Report) {
    let _ = socket.write_all(report.to_line().as_bytes());
}

/// Reports that the command is stopped, if the socket has room: a `simba` that does not read, and a command that
/// stops repeatedly, must not block the guard.
fn report_stop(socket: &UnixStream) {
    let _ = send(socket, Report::Stopped.to_line().as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

fn report_of(status: WaitStatus) -> Option<Report> {
    if status.stopped() {
        return Some(Report::Stopped);
    }
    status.exit_status().map(Report::Exited).or_else(|| status.terminating_signal().map(Report::Signaled))
}

/// Receives the first message: the standard input of the command, and the first order.
fn receive(socket: &UnixStream) -> io::Result<(OwnedFd, Vec<u8>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 512];
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut rights, RecvFlags::CMSG_CLOEXEC)?;
    let input = rights.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let input = input.ok_or(io::ErrorKind::InvalidData)?;
    Ok((input, bytes[..got.bytes].to_vec()))
}

/// Removes and returns the next complete order. Skips those that it cannot parse.
fn take_order(received: &mut Vec<u8>) -> Option<protocol::Order> {
    loop {
        let end = received.iter().position(|byte| *byte == b'\n')?;
        let text: Vec<u8> = received.drain(..=end).collect();
        if let Some(order) = Order::parse(&String::from_utf8_lossy(&text)) {
            return Some(order);
        }
    }
}

/// Reaps all child processes, and passes their states on.
struct Reaper {
    /// Readable when the state of a child has changed.
    changes: SignalFd,
    exits: Vec<(Pid, WaitStatus)>,
}

impl Reaper {
    /// Starts to receive changes. The signal must be blocked, or it would not be received.
    fn start() -> io::Result<Self> {
        let mut signals = SigSet::empty();
        signals.add(NixSignal::SIGCHLD);
        let changes = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Self { changes, exits: Vec::new() })
    }

    /// Reaps the children that have ended. Returns whether no child is left, so that none can be added.
    fn reap(&mut self) -> bool {
        // Before the children: a change after this makes it readable again.
        let _ = self.changes.read_signal();
        loop {
            match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some(exit)) => self.exits.push(exit),
                Ok(None) => return false,
                Err(Errno::INTR) => {}
                Err(_) => return true,
            }
        }
    }

    /// Returns the states of the children since the last call.
    fn take(&mut self) -> Vec<(Pid, WaitStatus)> {
        self.reap();
        std::mem::take(&mut self.exits)
    }
}
