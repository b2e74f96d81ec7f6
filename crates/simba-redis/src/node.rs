//! One server's command connection, kept alive: broken off when silent, made anew when gone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use simba_core::{Clock, Error, ErrorKind, Result, within};
use simba_net::{Backoff, ClockStep, ServerClock};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use crate::config::{Address, Settings};
use crate::error;
use crate::pipe::{Limits, Pipe};
use crate::resp::{self, Reply};
use crate::scripts::{Invocation, Script, Scripts};
use crate::sentinel::Sentinel;
use crate::spread_probe::Spread;
use crate::stream::Stream;
use crate::wire::Wire;

/// How long a call waits for a connection that is being made.
const PATIENCE: Duration = Duration::from_millis(100);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A connection that lasted this long was a good one, and so was one that answered a call: the next is tried at once.
pub(crate) const GOOD: Duration = Duration::from_millis(200);
/// How many connections in a row may end at the probe before one goes without: a proxy may hang up at it.
const PROBES: u32 = 2;

/// What all connections of one handle share.
pub(crate) struct Context {
    pub(crate) settings: Settings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) scripts: Scripts,
    /// Whether keys of different mutexes are on different servers.
    pub(crate) spread: Arc<Spread>,
    /// The newest state of the sentinels that this handle has followed.
    pub(crate) sentinel_epoch: AtomicU64,
    /// Notified when commands go to another server than before, though no connection was lost.
    pub(crate) moved: Notify,
}

impl Context {
    pub(crate) fn new(settings: Settings, clock: Arc<dyn Clock>) -> Self {
        let scripts = Scripts::new(settings.fence_retention);
        let (spread, sentinel_epoch, moved) = (Arc::default(), AtomicU64::new(0), Notify::new());
        Self { settings, clock, scripts, spread, sentinel_epoch, moved }
    }

    pub(crate) fn limits(&self) -> Limits {
        let settings = &self.settings;
        let wait = settings.wait.map_or(Duration::ZERO, |wait| wait.timeout);
        // A server that waits for its replicas is silent on purpose.
        Limits { silence: settings.timeout + wait, ping: settings.ping }
    }

    pub(crate) async fn pause(&self, backoff: &mut Backoff) {
        self.clock.sleep_until(self.clock.now() + backoff.pause()).await;
    }

    /// Connects to a server that is to run the scripts.
    pub(crate) async fn ready(&self, address: &Address) -> Result<Wire> {
        // On every connection: a server that was restarted or promoted may not have them, and a thousand calls at
        // once would each have to send the source.
        let load = self.scripts.load();
        let load: Vec<&[&str]> = load.iter().map(|question| &question[..]).collect();
        let (settings, clock) = (&self.settings, &*self.clock);
        let (wire, replies) = match Wire::open_with(address, settings, &settings.login, clock, &load).await {
            Err(cause) if error::is_hang_up(&cause) => {
                return Err(self.explain_hang_up(address, cause).await);
            }
            opened => opened?,
        };
        self.scripts.loaded(&replies).ok_or_else(|| error::unexpected("a script"))?;
        Ok(wire)
    }

    /// Returns why a connection ended while scripts were loaded: a proxy that knows no scripts hangs up, on every
    /// connection and only then.
    async fn explain_hang_up(&self, address: &Address, cause: Error) -> Error {
        let (settings, clock) = (&self.settings, &*self.clock);
        let Ok(mut wire) = Wire::open(address, settings, &settings.login, clock).await else { return cause };
        let load = ["SCRIPT", "LOAD", "return 1"];
        match wire.ask_within(clock, settings.timeout, &load).await {
            Err(again) if error::is_hang_up(&again) => error::no_scripts(address).with_source(again),
            _ => cause,
        }
    }
}

pub(crate) fn backoff() -> Backoff {
    Backoff::new(FIRST_PAUSE, LONGEST_PAUSE)
}

/// Which server to connect to.
pub(crate) enum Source {
    /// A server, or whatever stands at its address.
    Fixed(Address),
    /// A node of a cluster.
    Member(Address),
    /// The master that the sentinels name.
    Sentinel(Sentinel),
}

impl Source {
    async fn open(&self, context: &Context) -> Result<(Stream, Address)> {
        let (wire, address) = match self {
            Self::Fixed(address) | Self::Member(address) => (context.ready(address).await?, address.clone()),
            Self::Sentinel(sentinel) => sentinel.connect(context).await?,
        };
        Ok((wire.into_stream()?, address))
    }

    /// Completes when the server is not the right one any more.
    async fn moved(&self, address: &Address, context: &Context) -> Error {
        match self {
            Self::Fixed(_) | Self::Member(_) => std::future::pending().await,
            Self::Sentinel(sentinel) => sentinel.moved(address, context).await,
        }
    }
}

#[derive(Clone)]
enum State {
    Up(Pipe),
    Down(Error),
}

/// One server, as one handle sees it.
pub(crate) struct Node {
    context: Arc<Context>,
    state: watch::Sender<State>,
    task: OnceLock<AbortHandle>,
    server_clock: Arc<ServerClock>,
    /// The last call found a replica.
    demoted: AtomicBool,
    /// Where it is, unless others say so.
    address: Option<Address>,
}

impl Node {
    /// Connects and keeps connected from then on.
    pub(crate) async fn connect(source: Source, context: Arc<Context>) -> Result<Arc<Self>> {
        let first = source.open(&context).await?;
        Ok(Self::start(source, context, Some(first)))
    }

    /// Keeps connected; the first connection comes when it comes.
    pub(crate) fn start(
        source: Source,
        context: Arc<Context>,
        first: Option<(Stream, Address)>,
    ) -> Arc<Self> {
        let (state, _) = watch::channel(State::Down(error::gone()));
        let server_clock = Arc::<ServerClock>::default();
        let address = match &source {
            Source::Fixed(address) | Source::Member(address) => Some(address.clone()),
            Source::Sentinel(_) => None,
        };
        let node = Arc::new(Self {
            context: Arc::clone(&context),
            state,
            task: OnceLock::new(),
            server_clock: Arc::clone(&server_clock),
            demoted: AtomicBool::new(false),
            address,
        });
        let task = tokio::spawn(supervise(source, context, node.state.clone(), server_clock, first));
        node.task.get_or_init(|| task.abort_handle());
        node
    }

    pub(crate) fn address(&self) -> Option<&Address> {
        self.address.as_ref()
    }

    /// The connection; waits a moment for one that is being made.
    pub(crate) async fn pipe(&self) -> Result<Pipe> {
        if let State::Up(pipe) = &*self.state.borrow()
            && !pipe.is_broken()
        {
            return Ok(pipe.clone());
        }
        // Boxed: seldom, and larger than the call that it is for.
        Box::pin(self.next_pipe()).await
    }

    async fn next_pipe(&self) -> Result<Pipe> {
        let mut states = self.state.subscribe();
        let up = async {
            let is_up = |state: &State| matches!(state, State::Up(pipe) if !pipe.is_broken());
            match states.wait_for(is_up).await.as_deref() {
                Ok(State::Up(pipe)) => Some(pipe.clone()),
                _ => None,
            }
        };
        let pipe = within(&*self.context.clock, PATIENCE, up).await.flatten();
        pipe.ok_or_else(|| self.cause())
    }

    /// The connection, if there is one.
    pub(crate) fn pipe_now(&self) -> Option<Pipe> {
        match &*self.state.borrow() {
            State::Up(pipe) => Some(pipe.clone()),
            State::Down(_) => None,
        }
    }

    /// Returns by how much the server's clock was set since the first connection, at the last time.
    pub(crate) fn clock_step(&self) -> Option<ClockStep> {
        self.server_clock.last_step()
    }

    fn cause(&self) -> Error {
        match &*self.state.borrow() {
            State::Down(cause) if !cause.is_transient() => cause.clone(),
            State::Down(cause) => error::new(ErrorKind::Unavailable, "there is no connection to the server")
                .with_source(cause.clone()),
            State::Up(_) => error::gone(),
        }
    }

    /// Runs a script; what the server said, an error reply too, and the connection that it said it on.
    pub(crate) async fn invoke(&self, call: &Invocation<'_>) -> Result<(Reply, Pipe)> {
        let pipe = self.pipe().await?;
        let scripts = &self.context.scripts;
        let mut reply = pipe.invoke(call, scripts).await?;
        match &reply {
            Reply::Nil => reply = pipe.call(|out| call.write(out, scripts)).await?,
            Reply::Error(words) if is_forgotten(words) && call.usual.is_some() => {
                let load = resp::command(&["SCRIPT", "LOAD", scripts.source(Script::Many)]);
                pipe.send(|out| out.extend_from_slice(&load))?;
            }
            _ => {}
        }
        if matches!(&reply, Reply::Error(words) if is_forgotten(words)) {
            reply = pipe.call(|out| call.write_source(out, scripts)).await?;
        }
        match &reply {
            // Not the master any more. Sentinels, a name or an address that moves may lead to the new one.
            Reply::Error(words) if error::is_no_master(words) => {
                self.demoted.store(true, Ordering::Relaxed);
                pipe.break_off(error::refused(words));
            }
            Reply::Error(_) => {}
            _ if self.demoted.load(Ordering::Relaxed) => {
                self.demoted.store(false, Ordering::Relaxed);
                // Subscriptions may still be at the old master, whose messages come late and do not count there.
                self.context.moved.notify_one();
            }
            _ => {}
        }
        Ok((reply, pipe))
    }

    pub(crate) fn close(&self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
        let last = self.state.send_replace(State::Down(error::closed()));
        if let State::Up(pipe) = last {
            pipe.break_off(error::closed());
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.close();
    }
}

/// Whether the server does not know a script any more.
fn is_forgotten(words: &str) -> bool {
    words.starts_with("NOSCRIPT")
}

/// Keeps one connection up, for ever.
async fn supervise(
    source: Source,
    context: Arc<Context>,
    state: watch::Sender<State>,
    server_clock: Arc<ServerClock>,
    mut first: Option<(Stream, Address)>,
) {
    let mut backoff = backoff();
    let mut ended_at_probe = 0;
    let mut last = None;
    loop {
        let opened = match first.take() {
            Some(first) => Ok(first),
            None => source.open(&context).await,
        };
        match opened {
            Ok((stream, address)) => {
                if last.replace(address.clone()).is_some_and(|last| last != address) {
                    // Subscriptions may still be at the old master, which may not know that it is none.
                    context.moved.notify_one();
                }
                let (began, pipe) = (context.clock.now(), Pipe::new(Arc::clone(&context.spread)));
                if ended_at_probe >= PROBES {
                    pipe.skip_probe();
                } else if !matches!(source, Source::Member(_)) {
                    // Before any call. The nodes of a cluster have one call per mutex in any case.
                    pipe.probe_spread();
                }
                let cause = carry(&source, &context, &state, &pipe, &server_clock, stream, &address).await;
                tracing::debug!(server = %address, %cause, "the connection is lost");
                let at_probe = pipe.is_probing() && error::is_hang_up(&cause);
                ended_at_probe = if at_probe { ended_at_probe + 1 } else { 0 };
                // A server that is still a replica is not worth a fast reconnect.
                let useful = pipe.has_answered() && !error::words(&cause).is_some_and(error::is_no_master);
                if useful || context.clock.now() - began >= GOOD {
                    backoff.reset();
                }
                state.send_replace(State::Down(cause));
            }
            Err(cause) => {
                tracing::debug!(%cause, "no connection");
                state.send_replace(State::Down(cause));
            }
        }
        context.pause(&mut backoff).await;
    }
}

async fn carry(
    source: &Source,
    context: &Context,
    state: &watch::Sender<State>,
    pipe: &Pipe,
    server_clock: &ServerClock,
    stream: Stream,
    address: &Address,
) -> Error {
    state.send_replace(State::Up(pipe.clone()));
    tracing::debug!(server = %address, "connected");
    let cause = tokio::select! {
        biased;
        cause = pipe.drive(stream, &*context.clock, context.limits(), server_clock) => cause,
        cause = source.moved(address, context) => cause,
    };
    pipe.break_off(cause.clone());
    cause
}
