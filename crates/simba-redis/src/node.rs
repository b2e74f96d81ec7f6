//! One server's command connection, kept alive: broken off when silent, made anew when gone.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use simba_core::{Clock, Error, ErrorKind, Result, within};
use simba_net::Backoff;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::config::{Address, Settings};
use crate::error;
use crate::pipe::{Limits, Pipe};
use crate::resp::{self, Reply};
use crate::scripts::{Digests, Invocation, Script};
use crate::sentinel::Sentinel;
use crate::stream::Stream;
use crate::wire::Wire;

/// How long a call waits for a connection that is being made.
const PATIENCE: Duration = Duration::from_millis(100);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A connection that lasted this long was a good one, and so was one that answered a call: the next is tried at once.
pub(crate) const GOOD: Duration = Duration::from_millis(200);

/// What all connections of one handle share.
pub(crate) struct Context {
    pub(crate) settings: Settings,
    pub(crate) clock: Arc<dyn Clock>,
    /// The same on every server, known after the first connection.
    pub(crate) digests: OnceLock<Digests>,
}

impl Context {
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
        let load = Script::ALL.map(|script| ["SCRIPT", "LOAD", script.source()]);
        let load: Vec<&[&str]> = load.iter().map(|question| &question[..]).collect();
        // A server that forgot them says so, and gets them then.
        let load = if self.digests.get().is_some() { &[][..] } else { &load };
        let (settings, clock) = (&self.settings, &*self.clock);
        let (wire, replies) = Wire::open_with(address, settings, &settings.login, clock, load).await?;
        if !load.is_empty() {
            let digests = digests(&replies).ok_or_else(|| error::unexpected("a script"))?;
            self.digests.get_or_init(|| digests);
        }
        Ok(wire)
    }
}

pub(crate) fn backoff() -> Backoff {
    Backoff::new(FIRST_PAUSE, LONGEST_PAUSE)
}

fn digests(replies: &[Reply]) -> Option<Digests> {
    let digests: Option<Vec<String>> = replies.iter().map(|reply| reply.text().map(Into::into)).collect();
    digests?.try_into().ok()
}

/// Which server to connect to.
pub(crate) enum Source {
    Fixed(Address),
    /// Whoever is the master now.
    Sentinel(Sentinel),
}

impl Source {
    async fn open(&self, context: &Context) -> Result<(Stream, Address)> {
        let (wire, address) = match self {
            Self::Fixed(address) => (context.ready(address).await?, address.clone()),
            Self::Sentinel(sentinel) => sentinel.connect(context).await?,
        };
        Ok((wire.into_stream()?, address))
    }

    /// Completes when the server is not the right one any more.
    async fn moved(&self, address: &Address, context: &Context) -> Error {
        match self {
            Self::Fixed(_) => std::future::pending().await,
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
    follows: bool,
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
        let follows = matches!(source, Source::Sentinel(_));
        let node = Arc::new(Self { context: Arc::clone(&context), state, task: OnceLock::new(), follows });
        let task = tokio::spawn(supervise(source, context, node.state.clone(), first));
        node.task.get_or_init(|| task.abort_handle());
        node
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
        let digests = self.context.digests.get();
        let mut reply = pipe.invoke(call, digests).await?;
        match &reply {
            Reply::Nil => reply = pipe.call(|out| call.write(out, digests)).await?,
            Reply::Error(words) if is_forgotten(words) && call.usual.is_some() => {
                let load = resp::command(&["SCRIPT", "LOAD", Script::Many.source()]);
                pipe.send(|out| out.extend_from_slice(&load))?;
            }
            _ => {}
        }
        if matches!(&reply, Reply::Error(words) if is_forgotten(words)) {
            reply = pipe.call(|out| call.write(out, None)).await?;
        }
        if let (true, Reply::Error(words)) = (self.follows, &reply)
            && ["READONLY", "MASTERDOWN", "LOADING"].iter().any(|code| words.starts_with(code))
        {
            // Not the master any more: ask who is.
            pipe.break_off(error::refused(words));
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
    mut first: Option<(Stream, Address)>,
) {
    let mut backoff = backoff();
    loop {
        let opened = match first.take() {
            Some(first) => Ok(first),
            None => source.open(&context).await,
        };
        match opened {
            Ok((stream, address)) => {
                let (began, pipe) = (context.clock.now(), Pipe::new());
                let cause = carry(&source, &context, &state, &pipe, stream, &address).await;
                tracing::debug!(server = %address, %cause, "the connection is lost");
                state.send_replace(State::Down(cause));
                if pipe.has_answered() || context.clock.now() - began >= GOOD {
                    backoff.reset();
                }
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
    stream: Stream,
    address: &Address,
) -> Error {
    state.send_replace(State::Up(pipe.clone()));
    tracing::debug!(server = %address, "connected");
    let cause = tokio::select! {
        biased;
        cause = pipe.drive(stream, &*context.clock, context.limits()) => cause,
        cause = source.moved(address, context) => cause,
    };
    pipe.break_off(cause.clone());
    cause
}
