//! A fresh connection, used by one party at a time: for logins, questions and subscriptions.

use std::io;
use std::time::Duration;

use simba_core::{Clock, Error, Result, within};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::config::{Address, Login, Settings};
use crate::error;
use crate::resp::{self, Reply};
use crate::stream::Stream;

pub(crate) struct Wire {
    stream: Stream,
    buffer: Vec<u8>,
}

impl Wire {
    /// Connects and logs in.
    pub(crate) async fn open(
        address: &Address,
        settings: &Settings,
        login: &Login,
        clock: &dyn Clock,
    ) -> Result<Self> {
        Self::open_with(address, settings, login, clock, &[]).await.map(|(wire, _)| wire)
    }

    /// Connects, logs in and asks, in one round trip; an error reply is an error.
    pub(crate) async fn open_with(
        address: &Address,
        settings: &Settings,
        login: &Login,
        clock: &dyn Clock,
        questions: &[&[&str]],
    ) -> Result<(Self, Vec<Reply>)> {
        let stream = Stream::open(address, settings, clock).await?;
        let mut wire = Self { stream, buffer: Vec::new() };
        let entered = within(clock, settings.timeout, wire.enter(login, questions)).await;
        let replies = entered.unwrap_or_else(|| Err(error::silent(settings.timeout)))?;
        Ok((wire, replies))
    }

    async fn enter(&mut self, login: &Login, questions: &[&[&str]]) -> Result<Vec<Reply>> {
        let mut words = Vec::new();
        match (&login.user, &login.password) {
            (Some(user), Some(password)) => words.extend(resp::command(&["AUTH", user, password])),
            (None, Some(password)) => words.extend(resp::command(&["AUTH", password])),
            (_, None) => {}
        }
        let database = login.database.to_string();
        let select: &[&str] = &["SELECT", &database];
        // The first sign that it is a Redis, and that we may use it.
        let ping: &[&str] = &["PING"];
        let select = (login.database > 0).then_some(select);
        let asked: Vec<&[&str]> = select.into_iter().chain([ping]).chain(questions.iter().copied()).collect();
        asked.iter().for_each(|question| words.extend(resp::command(question)));
        self.send(&words).await?;
        if login.password.is_some()
            && let Reply::Error(words) = self.reply().await?
        {
            return Err(error::login(&words));
        }
        let mut replies = Vec::with_capacity(asked.len());
        for _ in &asked {
            match self.reply().await? {
                Reply::Error(words) => return Err(error::refused(&words)),
                reply => replies.push(reply),
            }
        }
        Ok(replies.split_off(asked.len() - questions.len()))
    }

    /// Sends one command and reads its reply; an error reply is an error.
    pub(crate) async fn ask(&mut self, command: &[&str]) -> Result<Reply> {
        self.send(&resp::command(command)).await?;
        match self.reply().await? {
            Reply::Error(words) => Err(error::refused(&words)),
            reply => Ok(reply),
        }
    }

    /// The same within a limit.
    pub(crate) async fn ask_within(
        &mut self,
        clock: &dyn Clock,
        limit: Duration,
        command: &[&str],
    ) -> Result<Reply> {
        within(clock, limit, self.ask(command)).await.unwrap_or_else(|| Err(error::silent(limit)))
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).await.map_err(error::io)?;
        self.stream.flush().await.map_err(error::io)
    }

    /// The next reply.
    ///
    /// # Cancel safety
    ///
    /// What was read of it stays for the next call.
    pub(crate) async fn reply(&mut self) -> Result<Reply> {
        loop {
            if let Some((reply, length)) = resp::parse(&self.buffer).map_err(error::malformed)? {
                self.buffer.drain(..length);
                return Ok(reply);
            }
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) => return Err(error::io(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(cause) => return Err(error::io(cause)),
            }
        }
    }

    /// The bare connection, on which nothing is outstanding.
    pub(crate) fn into_stream(self) -> Result<Stream> {
        match self.buffer.is_empty() {
            true => Ok(self.stream),
            false => Err(unasked()),
        }
    }
}

fn unasked() -> Error {
    error::unasked()
}
