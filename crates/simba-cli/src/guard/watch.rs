//! What the guard does: waits for orders, for the time, and for the command, whichever comes first.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::SigSet;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process_group, set_child_subreaper, wait,
};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use simba_mutex::{Clock, Moment, SystemClock};

use super::tree::{Spared, fell};
use super::wire::{Order, Report};
use super::{trampoline, wire};
use crate::terminal::Terminal;

/// The hidden word that starts it: then the group to give the terminal back to (`0` if the command does not get
/// it), and the command.
pub(crate) const WORD: &str = "__guard";

/// How long a killed process may take to be gone, at the least.
const REAPING: Duration = Duration::from_secs(2);

/// Guards the command. Its standard input is the line to `simba`, which sends the command's own over it.
pub(crate) fn guard(words: &[OsString]) -> ExitCode {
    // A service manager tells all processes of a service to end. This one ends when the command has.
    let _ = SigSet::all().thread_block();
    let _ = rustix::thread::set_name(c"simba-guard");
    // The line to `simba` may be the very thing that is broken: it hears of an error by the silence.
    match Watch::begin(words).and_then(|watch| watch.map_or(Ok(()), Watch::keep)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// One command under guard.
struct Watch {
    line: UnixStream,
    /// Bytes of a line that is not whole yet.
    heard: Vec<u8>,
    timer: OwnedFd,
    deaths: Deaths,
    command: Pid,
    end: Moment,
    kill: Moment,
    /// The command was told to end since its time was up.
    overdue: bool,
    /// How the command ended.
    outcome: Option<Report>,
    /// Who gets the terminal back.
    back_to: Option<Pid>,
}

/// What becomes of the turn of the loop.
enum Next {
    On,
    /// The command is over, or has to be.
    Over,
}

impl Watch {
    /// Starts the command, unless its time is up before it could begin.
    fn begin(words: &[OsString]) -> io::Result<Option<Self>> {
        let [foreground, command @ ..] = words else { return Err(io::ErrorKind::InvalidInput.into()) };
        // What the command leaves behind becomes ours, and not the init process's.
        set_child_subreaper(Some(getpid()))?;
        let line = UnixStream::from(fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
        let (input, mut heard) = receive(&line)?;
        let Some(Order::Until { end, kill }) = take_line(&mut heard) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        if SystemClock.now() >= end {
            report(&line, Report::Clean { overdue: true });
            return Ok(None);
        }
        let command = match start(foreground, command, input) {
            Ok(command) => command,
            Err(error) => {
                report(&line, Report::Failed(error.raw_os_error().unwrap_or_default()));
                return Ok(None);
            }
        };
        report(&line, Report::Started(command.as_raw_nonzero().get()));
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Boottime, flags)?;
        let back_to = foreground.to_str().and_then(|group| Pid::from_raw(group.parse().ok()?));
        let deaths = Deaths::watch()?;
        let watch =
            Self { line, heard, timer, deaths, command, end, kill, overdue: false, outcome: None, back_to };
        watch.wind()?;
        Ok(Some(watch))
    }

    /// Waits until the command is over, then leaves nothing of it behind.
    fn keep(mut self) -> io::Result<()> {
        while let Next::On = self.turn()? {}
        // The kernel's word that there is nobody left, since orphans become our children.
        // A command that ended early leaves time until the deadline, which a busy machine may need.
        let limit = REAPING.max(self.kill.saturating_since(SystemClock.now()));
        let all_ended = fell(getpid(), &Spared::default(), limit, || self.deaths.is_alone());
        if let Some(group) = self.back_to {
            // `simba` may be killed or stopped, and who waits for it wants to read.
            Terminal::find().give_back(self.command, group);
        }
        // It may have ended by itself in the last moment. A stop is our own by now, and not reported.
        self.read_deaths(|_| {});
        // Only now: these may wait for a `simba` that is stopped, and nothing is left that would run meanwhile.
        if let Some(outcome) = self.outcome {
            report(&self.line, outcome);
        }
        let clean = Report::Clean { overdue: self.overdue };
        report(&self.line, if all_ended { clean } else { Report::Unclean });
        Ok(())
    }

    fn turn(&mut self) -> io::Result<Next> {
        let [line, timer, deaths] = self.wait()?;
        if timer && let Next::Over = self.look_at_the_clock()? {
            return Ok(Next::Over);
        }
        if deaths && self.read_deaths(report_stop) {
            return Ok(Next::Over);
        }
        if line { self.hear() } else { Ok(Next::On) }
    }

    /// Which of the three have something to say.
    fn wait(&self) -> io::Result<[bool; 3]> {
        let mut fds = [
            PollFd::new(&self.line, PollFlags::IN),
            PollFd::new(&self.timer, PollFlags::IN),
            PollFd::new(&self.deaths.bell, PollFlags::IN),
        ];
        while let Err(error) = poll(&mut fds, None) {
            if error != Errno::INTR {
                return Err(error.into());
            }
        }
        Ok(fds.each_ref().map(|fd| !fd.revents().is_empty()))
    }

    // ===== time =====

    /// Sets the timer to what comes next, on the clock of the leases.
    fn wind(&self) -> io::Result<()> {
        let next = if self.overdue { self.kill } else { self.end };
        let at = Timespec::try_from(next - Moment::ZERO).map_err(|_| io::ErrorKind::InvalidInput)?;
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let once = Itimerspec { it_interval: never, it_value: at };
        timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &once)?;
        Ok(())
    }

    fn look_at_the_clock(&mut self) -> io::Result<Next> {
        let now = SystemClock.now();
        if now >= self.kill {
            self.overdue = true;
            return Ok(Next::Over);
        }
        if now >= self.end && !self.overdue {
            self.overdue = true;
            self.signal(Signal::TERM);
        }
        self.wind()?;
        Ok(Next::On)
    }

    /// Signals the command and what is left in its group. What is stopped is continued, so that it handles the signal.
    fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.command, signal);
        if matches!(signal, Signal::TERM | Signal::HUP) {
            let _ = kill_process_group(self.command, Signal::CONT);
        }
    }

    // ===== orders =====

    /// Hears what `simba` says; if it is gone, the command goes too.
    fn hear(&mut self) -> io::Result<Next> {
        let mut bytes = [0; 512];
        match self.line.read(&mut bytes) {
            Ok(0) => return Ok(Next::Over),
            Ok(count) => self.heard.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Ok(Next::Over),
        }
        while let Some(order) = take_line(&mut self.heard) {
            if let Next::Over = self.obey(order)? {
                return Ok(Next::Over);
            }
        }
        Ok(Next::On)
    }

    fn obey(&mut self, order: Order) -> io::Result<Next> {
        match order {
            // What was told to end is not told otherwise.
            Order::Until { .. } if self.overdue => {}
            Order::Until { end, kill } => {
                (self.end, self.kill) = (end, kill);
                self.wind()?;
            }
            Order::Signal(number) => {
                if let Some(signal) = Signal::from_named_raw(number) {
                    self.signal(signal);
                }
            }
            Order::End => {
                self.end = SystemClock.now();
                return self.look_at_the_clock();
            }
            Order::Kill => {
                self.overdue = true;
                return Ok(Next::Over);
            }
        }
        Ok(Next::On)
    }

    // ===== the command =====

    /// Reads the state of the command; returns whether it has ended. Calls `stopped` if it is stopped.
    fn read_deaths(&mut self, stopped: fn(&UnixStream)) -> bool {
        for (pid, status) in self.deaths.take() {
            // The others are what it left behind, and only had to be reaped.
            if pid != self.command {
                continue;
            }
            match report_of(status) {
                Some(Report::Stopped) => stopped(&self.line),
                Some(outcome) => self.outcome = Some(outcome),
                None => {}
            }
        }
        self.outcome.is_some()
    }
}

/// By the thread that lives as long as the guard: the command dies with the thread that started it.
fn start(foreground: &OsString, command: &[OsString], input: OwnedFd) -> io::Result<Pid> {
    let child = Command::new("/proc/self/exe")
        .arg0("simba")
        .arg(trampoline::WORD)
        .arg(getpid().to_string())
        .arg(foreground)
        .args(command)
        .stdin(Stdio::from(input))
        .process_group(0)
        .spawn()?;
    Ok(Pid::from_child(&child))
}

/// A `simba` that is gone is noticed where orders are heard.
fn report(mut line: &UnixStream, report: Report) {
    let _ = line.write_all(report.to_line().as_bytes());
}

/// Reports that the command is stopped, if there is room: a `simba` that does not read, and a command that
/// stops again and again, must not keep the guard from its work.
fn report_stop(line: &UnixStream) {
    let _ = send(line, Report::Stopped.to_line().as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

fn report_of(status: WaitStatus) -> Option<Report> {
    if status.stopped() {
        return Some(Report::Stopped);
    }
    status.exit_status().map(Report::Exited).or_else(|| status.terminating_signal().map(Report::Signaled))
}

/// The first message: the command's own standard input, and the first order.
fn receive(line: &UnixStream) -> io::Result<(OwnedFd, Vec<u8>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 512];
    let got = recvmsg(line, &mut [IoSliceMut::new(&mut bytes)], &mut rights, RecvFlags::CMSG_CLOEXEC)?;
    let input = rights.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let input = input.ok_or(io::ErrorKind::InvalidData)?;
    Ok((input, bytes[..got.bytes].to_vec()))
}

/// The next order that is there as a whole. One that is not understood is none.
fn take_line(heard: &mut Vec<u8>) -> Option<wire::Order> {
    loop {
        let end = heard.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = heard.drain(..=end).collect();
        if let Some(order) = Order::parse(&String::from_utf8_lossy(&line)) {
            return Some(order);
        }
    }
}

/// Reaps all that ends below us, and tells of it.
struct Deaths {
    bell: Arc<OwnedFd>,
    seen: Arc<Mutex<VecDeque<(Pid, WaitStatus)>>>,
    alone: Arc<AtomicBool>,
}

impl Deaths {
    /// Starts to reap; ends when there is nobody left.
    fn watch() -> io::Result<Self> {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let seen = Arc::new(Mutex::new(VecDeque::new()));
        let alone = Arc::new(AtomicBool::new(false));
        let watch = Self { bell: Arc::clone(&bell), seen: Arc::clone(&seen), alone: Arc::clone(&alone) };
        thread::Builder::new().name("simba-reaper".into()).spawn(move || {
            loop {
                match wait(WaitOptions::UNTRACED) {
                    Ok(Some(death)) => {
                        seen.lock().unwrap_or_else(PoisonError::into_inner).push_back(death);
                        let _ = rustix::io::write(bell.as_fd(), &1u64.to_ne_bytes());
                    }
                    Ok(None) | Err(Errno::INTR) => {}
                    Err(_) => return alone.store(true, Ordering::Release),
                }
            }
        })?;
        Ok(watch)
    }

    /// Whether there is nobody left to reap, and nobody who could come.
    fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Acquire)
    }

    fn take(&self) -> VecDeque<(Pid, WaitStatus)> {
        let _ = rustix::io::read(self.bell.as_fd(), &mut [0u8; 8]);
        std::mem::take(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
