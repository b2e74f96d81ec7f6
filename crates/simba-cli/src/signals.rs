//! The signals that `simba` passes on.

use std::io;
use std::task::Poll;

use rustix::process::{Signal as Number, WaitOptions, wait};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::broadcast;

/// All that a person or a service manager sends. The rest is the kernel's, or stops.
const PASSED_ON: [Number; 10] = [
    Number::TERM,
    Number::INT,
    Number::HUP,
    Number::QUIT,
    Number::USR1,
    Number::USR2,
    Number::ALARM,
    Number::WINCH,
    Number::IO,
    Number::POWER,
];

/// Those that ask to end, with their names.
const ENDING: [(Number, &str); 4] =
    [(Number::TERM, "SIGTERM"), (Number::INT, "SIGINT"), (Number::HUP, "SIGHUP"), (Number::QUIT, "SIGQUIT")];

/// Where signals are passed on to whichever command runs. None are kept for a later one.
pub(crate) type Relay = broadcast::Sender<i32>;

/// A relay that nobody listens to yet.
pub(crate) fn relay() -> Relay {
    broadcast::channel(16).0
}

/// Signals as they come.
#[derive(Debug)]
pub(crate) struct Signals {
    source: Source,
    /// Those so far that ask to end, in their order.
    asked: Vec<i32>,
}

#[derive(Debug)]
enum Source {
    /// The system.
    Heard(Vec<(i32, Signal)>),
    /// The task that hears them first.
    Relayed(broadcast::Receiver<i32>),
}

impl Signals {
    /// From here on no such signal ends this process, and what ends below it is reaped.
    ///
    /// A signal that was ignored from the start stays so, for the command too: `nohup` means both.
    pub(crate) fn listen() -> io::Result<Self> {
        tokio::spawn(reap(signal(SignalKind::child())?));
        Self::hear()
    }

    /// As [`listen`](Self::listen), for who reaps its own children.
    pub(crate) fn hear() -> io::Result<Self> {
        let ignored = ignored();
        let open = |number: Number| {
            let raw = number.as_raw();
            Ok((raw, signal(SignalKind::from_raw(raw))?))
        };
        let wanted = PASSED_ON.into_iter().filter(|number| ignored & (1 << (number.as_raw() - 1)) == 0);
        let streams = wanted.map(open).collect::<io::Result<_>>()?;
        Ok(Self { source: Source::Heard(streams), asked: Vec::new() })
    }

    /// Returns those that the relay passes on from now.
    pub(crate) fn of(relay: &Relay) -> Self {
        Self { source: Source::Relayed(relay.subscribe()), asked: Vec::new() }
    }

    /// Returns the signals so far that ask to end, the first one first.
    pub(crate) fn asked(&self) -> &[i32] {
        &self.asked
    }

    /// The next one.
    ///
    /// # Cancel safety
    ///
    /// A dropped call loses nothing.
    pub(crate) async fn next(&mut self) -> i32 {
        let number = self.source.next().await;
        if is_ending(number) && !self.asked.contains(&number) {
            self.asked.push(number);
        }
        number
    }

    /// The next one that asks to end.
    pub(crate) async fn end(&mut self) -> i32 {
        loop {
            let number = self.next().await;
            if is_ending(number) {
                return number;
            }
        }
    }

    /// The next one that asks to end; the others are passed on.
    pub(crate) async fn end_relaying(&mut self, relay: &Relay) -> i32 {
        loop {
            let number = self.next().await;
            if is_ending(number) {
                return number;
            }
            let _ = relay.send(number);
        }
    }

    /// Passes all of them on until something is done.
    pub(crate) async fn relaying<T>(&mut self, relay: &Relay, done: impl Future<Output = T>) -> T {
        tokio::pin!(done);
        loop {
            tokio::select! {
                biased;
                done = &mut done => return done,
                number = self.next() => drop(relay.send(number)),
            }
        }
    }

    /// One that asks to end and is here already.
    pub(crate) async fn ended(&mut self) -> Option<i32> {
        // A signal is heard only when the runtime looks, and it looks when it has nothing else to do.
        tokio::task::yield_now().await;
        tokio::select! {
            biased;
            number = self.end() => Some(number),
            () = std::future::ready(()) => None,
        }
    }
}

/// Returns whether a signal asks to end.
fn is_ending(number: i32) -> bool {
    ENDING.iter().any(|(ending, _)| ending.as_raw() == number)
}

/// Returns the name of a signal, or its number if it has none here.
pub(crate) fn name(number: i32) -> String {
    let known = ENDING.iter().find(|(signal, _)| signal.as_raw() == number);
    known.map_or_else(|| format!("signal {number}"), |(_, name)| (*name).to_owned())
}

impl Source {
    async fn next(&mut self) -> i32 {
        match self {
            Self::Heard(streams) => {
                std::future::poll_fn(|context| {
                    for (number, stream) in &mut *streams {
                        if stream.poll_recv(context).is_ready() {
                            return Poll::Ready(*number);
                        }
                    }
                    Poll::Pending
                })
                .await
            }
            Self::Relayed(heard) => loop {
                match heard.recv().await {
                    Ok(number) => return number,
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
                }
            },
        }
    }
}

/// The signals that this process was started to ignore, the first in the lowest bit.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Reaps what ends below us: guards, what a dead guard left behind, and everybody's orphans if we are the first
/// process of a container. The handler also keeps an ignored SIGCHLD from reaping behind our back.
async fn reap(mut deaths: Signal) {
    while deaths.recv().await.is_some() {
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
    }
}
