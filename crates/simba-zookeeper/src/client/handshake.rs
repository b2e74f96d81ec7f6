//! Opens a connection: the socket, TLS, the handshake, the login. Sends four-letter commands as well.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::within;
use simba_core::{Clock, Error, ErrorKind, Moment};
use simba_net::{Endpoint, dial};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;

use super::pipeline::PipelinedWrites;
use super::protocol::message::{self, Granted, Header};
use super::protocol::{Code, Frames, Malformed, Reader, Writer, sasl};
use crate::config::{Login, Scheme, ZookeeperConfig};

/// The byte streams of an open connection.
pub(super) struct Transport {
    pub(super) reader: Box<dyn AsyncRead + Send + Unpin>,
    pub(super) writer: Box<dyn AsyncWrite + Send + Unpin>,
    pub(super) frames: Frames,
    /// The time before the session was requested.
    pub(super) requested_at: Moment,
}

/// What is needed to resume a session on another connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Session {
    pub(super) id: i64,
    pub(super) password: Vec<u8>,
    /// The latest transaction that the client has seen. A server that is behind it refuses the session.
    pub(super) zxid: i64,
}

/// The outcome of a handshake that did not fail with an error.
pub(super) enum Handshake {
    Granted(Transport, Granted),
    /// The session has ended.
    Expired,
    /// The server did not answer in time. It may have received the request.
    Unanswered(Error),
}

impl Transport {
    /// Connects to one server, requests the session, and sends the pipelined `writes` behind that request.
    pub(super) async fn open(
        config: &ZookeeperConfig,
        endpoint: &Endpoint,
        session: &Session,
        timeout: u32,
        limit: Duration,
        clock: &Arc<dyn Clock>,
        writes: PipelinedWrites,
    ) -> Result<Handshake, Error> {
        let tcp = dial(&endpoint.host, endpoint.port, limit, &**clock).await;
        let tcp = tcp.map_err(|error| endpoint.unreachable(error))?;
        let outcome = within(&**clock, limit, async {
            let mut transport = match &config.tls {
                None => {
                    let (reader, writer) = tcp.into_split();
                    Self::of(reader, writer, clock.now())
                }
                Some(tls) => {
                    let connector = TlsConnector::from(tls.client_config()?);
                    let name = tls.server_name(&endpoint.host)?;
                    let stream = connector.connect(name, tcp).await.map_err(|e| endpoint.tls_failed(e))?;
                    let (reader, writer) = tokio::io::split(stream);
                    Self::of(reader, writer, clock.now())
                }
            };
            let granted = transport.handshake(endpoint, session, timeout, writes).await?;
            if granted.session == 0 || granted.timeout <= 0 {
                return Ok(Handshake::Expired);
            }
            if let Some(login) = &config.login {
                transport.log_in(endpoint, login).await?;
            }
            Ok(Handshake::Granted(transport, granted))
        });
        outcome.await.unwrap_or_else(|| Ok(Handshake::Unanswered(timed_out(endpoint, limit))))
    }

    pub(super) fn of(
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        requested_at: Moment,
    ) -> Self {
        Self { reader: Box::new(reader), writer: Box::new(writer), frames: Frames::default(), requested_at }
    }

    async fn handshake(
        &mut self,
        endpoint: &Endpoint,
        session: &Session,
        timeout: u32,
        mut writes: PipelinedWrites,
    ) -> Result<Granted, Error> {
        let mut writer = Writer::default();
        let timeout = i32::try_from(timeout).unwrap_or(i32::MAX);
        message::connect(session.zxid, timeout, session.id, &session.password, &mut writer);
        self.write(endpoint, &writer).await?;
        let frame = loop {
            tokio::select! {
                // Pipelined checks count as in flight, so they are written even if the answer has arrived.
                biased;
                // If the write fails, the server's last message has the reason.
                Some(more) = writes.recv() => drop(self.write(endpoint, &more).await),
                frame = self.frame(endpoint) => break frame?,
            }
        };
        message::connected(&frame).map_err(|malformed| not_zookeeper(endpoint, malformed))
    }

    async fn log_in(&mut self, endpoint: &Endpoint, login: &Login) -> Result<(), Error> {
        let mut writer = Writer::default();
        let password = login.password.read()?;
        match login.scheme {
            Scheme::Digest => {
                let credentials = format!("{}:{password}", login.user);
                message::authenticate("digest", credentials.as_bytes(), &mut writer);
                self.write(endpoint, &writer).await?;
                let frame = self.frame(endpoint).await?;
                accepted(endpoint, &mut Reader::new(&frame))
            }
            Scheme::Sasl => {
                message::sasl(1, &[], &mut writer);
                let challenge = self.token(endpoint, &writer).await?;
                let mut writer = Writer::default();
                let other = Malformed("the server's challenge is not DIGEST-MD5");
                let answer = sasl::answer(&challenge, &login.user, &password);
                let answer = answer.ok_or_else(|| not_zookeeper(endpoint, other))?;
                message::sasl(2, answer.text.as_bytes(), &mut writer);
                let reply = self.token(endpoint, &writer).await.map_err(|error| {
                    if closed_by_server(&error) { denied(endpoint).with_source(error) } else { error }
                })?;
                if answer.is_proven_by(&reply) { Ok(()) } else { Err(server_unproven(endpoint)) }
            }
        }
    }

    /// Performs one step of SASL: sends a token and returns the server's token.
    async fn token(&mut self, endpoint: &Endpoint, writer: &Writer) -> Result<Vec<u8>, Error> {
        self.write(endpoint, writer).await?;
        let frame = self.frame(endpoint).await?;
        let mut reader = Reader::new(&frame);
        accepted(endpoint, &mut reader)?;
        let token = reader.buffer().map_err(|malformed| not_zookeeper(endpoint, malformed))?;
        Ok(token.to_vec())
    }

    async fn write(&mut self, endpoint: &Endpoint, writer: &Writer) -> Result<(), Error> {
        self.writer.write_all(writer.bytes()).await.map_err(|error| broken(endpoint, error))?;
        self.writer.flush().await.map_err(|error| broken(endpoint, error))
    }

    /// Waits for the next message.
    ///
    /// # Cancel safety
    ///
    /// A dropped call loses no data.
    async fn frame(&mut self, endpoint: &Endpoint) -> Result<Vec<u8>, Error> {
        loop {
            if let Some(frame) = self.frames.next().map_err(|malformed| not_zookeeper(endpoint, malformed))? {
                return Ok(frame.to_vec());
            }
            match self.frames.fill(&mut self.reader).await {
                Ok(true) => {}
                Ok(false) => return Err(broken(endpoint, io::ErrorKind::UnexpectedEof.into())),
                Err(error) => return Err(broken(endpoint, error)),
            }
        }
    }
}

/// Returns whether the server closed the connection, which is how it refuses a password. A broken connection is not
/// a refusal.
fn closed_by_server(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof)
}

fn accepted(endpoint: &Endpoint, reader: &mut Reader<'_>) -> Result<(), Error> {
    let header = Header::read(reader).map_err(|malformed| not_zookeeper(endpoint, malformed))?;
    match Code::of(header.error) {
        None => Ok(()),
        Some(code) => Err(denied(endpoint).with_source(code)),
    }
}

/// Returns the reply of a server to a four-letter command, or `None` if it does not reply within `limit`.
pub(crate) async fn four_letters(
    command: &str,
    endpoint: &Endpoint,
    limit: Duration,
    clock: &dyn Clock,
) -> Option<String> {
    const MAX_REPLY: u64 = 16 << 10;
    let reply = async {
        let mut stream = dial(&endpoint.host, endpoint.port, limit, clock).await.ok()?;
        stream.write_all(command.as_bytes()).await.ok()?;
        let mut text = String::new();
        stream.take(MAX_REPLY).read_to_string(&mut text).await.ok()?;
        Some(text)
    };
    within(clock, limit, reply).await.flatten()
}

fn broken(endpoint: &Endpoint, error: io::Error) -> Error {
    let message = format!("{endpoint} broke the connection before it granted a session");
    Error::new(ErrorKind::Unavailable, message).with_source(error)
}

fn timed_out(endpoint: &Endpoint, limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{endpoint} did not grant a session within {limit:?}"))
}

fn denied(endpoint: &Endpoint) -> Error {
    let message = format!("{endpoint} refused the credentials: check the user and its password");
    Error::new(ErrorKind::Denied, message)
}

/// Returns the error for a server that accepted the login without proof that it knows the password.
fn server_unproven(endpoint: &Endpoint) -> Error {
    let message = format!(
        "{endpoint} does not prove that it knows the password: check that it is the right server, and use TLS"
    );
    Error::new(ErrorKind::Denied, message)
}

fn not_zookeeper(endpoint: &Endpoint, malformed: Malformed) -> Error {
    let message =
        format!("{endpoint} does not answer as a ZooKeeper does: check the port, and whether it wants TLS");
    Error::new(ErrorKind::Protocol, message).with_source(malformed)
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[tokio::test]
    async fn pipelined_writes_are_sent_even_if_the_answer_has_arrived() {
        let (near, mut far) = duplex(1 << 10);
        let (reader, writer) = tokio::io::split(near);
        let mut transport = Transport::of(reader, writer, Moment::ZERO);
        let mut answer = Writer::default();
        answer.frame(|w| {
            w.int(0).int(1_000).long(7).buffer(&[1; 16]);
        });
        far.write_all(answer.bytes()).await.unwrap();
        let (to, writes) = tokio::sync::mpsc::unbounded_channel();
        let mut more = Writer::default();
        more.frame(|w| {
            w.text("writes");
        });
        to.send(more).unwrap();
        let (endpoint, session) = (Endpoint { host: "h".into(), port: 1 }, Session::default());
        let granted = transport.handshake(&endpoint, &session, 1_000, writes).await.unwrap();
        assert_eq!(granted.session, 7);
        drop(transport);
        let mut written = Vec::new();
        far.read_to_end(&mut written).await.unwrap();
        assert!(written.ends_with(b"writes"), "{written:?}");
    }
}
