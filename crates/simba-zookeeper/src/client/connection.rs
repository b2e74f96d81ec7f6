//! One connection: the socket, TLS, the handshake, the credentials.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Clock, Error, ErrorKind, Moment, within};
use simba_net::{Place, dial};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;

use super::code::Code;
use super::early::Behind;
use super::frame::Frames;
use super::jute::{Malformed, Reader, Writer};
use super::message::{self, Granted, Header};
use super::sasl;
use crate::config::{Login, Scheme, ZookeeperConfig};

/// The two directions of a connection that a server has accepted.
pub(super) struct Wire {
    pub(super) reader: Box<dyn AsyncRead + Send + Unpin>,
    pub(super) writer: Box<dyn AsyncWrite + Send + Unpin>,
    pub(super) frames: Frames,
    /// When the session was asked for.
    pub(super) asked: Moment,
}

/// What a client knows of its session.
#[derive(Clone, Debug, Default)]
pub(super) struct Life {
    pub(super) session: i64,
    pub(super) password: Vec<u8>,
    /// The latest transaction it has seen: a server that knows less must not serve it.
    pub(super) zxid: i64,
}

/// How a handshake ended, if not with an error.
pub(super) enum Shake {
    Granted(Wire, Granted),
    /// The server does not have the session any more.
    Expired,
    /// The question may have come through, an answer did not.
    Unheard(Error),
}

impl Wire {
    /// Connects to one server and asks for the session, with whatever is to be said behind the question.
    pub(super) async fn open(
        config: &ZookeeperConfig,
        place: &Place,
        life: &Life,
        timeout: u32,
        limit: Duration,
        clock: &Arc<dyn Clock>,
        behind: Behind,
    ) -> Result<Shake, Error> {
        let tcp = dial(&place.host, place.port, limit, &**clock).await.map_err(|e| unreachable(place, e))?;
        let shaken = within(&**clock, limit, async {
            let mut wire = match &config.tls {
                None => {
                    let (reader, writer) = tcp.into_split();
                    Self::of(reader, writer, clock.now())
                }
                Some(tls) => {
                    let connector = TlsConnector::from(tls.client_config()?);
                    let name = tls.server_name(&place.host)?;
                    let stream = connector.connect(name, tcp).await.map_err(|e| refused(place, e))?;
                    let (reader, writer) = tokio::io::split(stream);
                    Self::of(reader, writer, clock.now())
                }
            };
            let granted = wire.shake(place, life, timeout, behind).await?;
            if granted.session == 0 || granted.timeout <= 0 {
                return Ok(Shake::Expired);
            }
            if let Some(login) = &config.login {
                wire.log_in(place, login).await?;
            }
            Ok(Shake::Granted(wire, granted))
        });
        shaken.await.unwrap_or_else(|| Ok(Shake::Unheard(silent(place, limit))))
    }

    pub(super) fn of(
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        asked: Moment,
    ) -> Self {
        Self { reader: Box::new(reader), writer: Box::new(writer), frames: Frames::default(), asked }
    }

    async fn shake(
        &mut self,
        place: &Place,
        life: &Life,
        timeout: u32,
        mut behind: Behind,
    ) -> Result<Granted, Error> {
        let mut writer = Writer::default();
        let timeout = i32::try_from(timeout).unwrap_or(i32::MAX);
        message::connect(life.zxid, timeout, life.session, &life.password, &mut writer);
        self.put(place, &writer).await?;
        let frame = loop {
            tokio::select! {
                // What was handed over is under way for all others: it is written even if the answer is there.
                biased;
                // Where it cannot be written, what the server said last tells why.
                Some(more) = behind.recv() => drop(self.put(place, &more).await),
                frame = self.frame(place) => break frame?,
            }
        };
        message::connected(&frame).map_err(|malformed| stranger(place, malformed))
    }

    async fn log_in(&mut self, place: &Place, login: &Login) -> Result<(), Error> {
        let mut writer = Writer::default();
        match login.scheme {
            Scheme::Digest => {
                let credentials = format!("{}:{}", login.user, login.password);
                message::authenticate("digest", credentials.as_bytes(), &mut writer);
                self.put(place, &writer).await?;
                let frame = self.frame(place).await?;
                accepted(place, &mut Reader::new(&frame))
            }
            Scheme::Sasl => {
                message::sasl(1, &[], &mut writer);
                let challenge = self.token(place, &writer).await?;
                let mut writer = Writer::default();
                let answer = sasl::answer(&challenge, &login.user, &login.password)
                    .ok_or_else(|| stranger(place, Malformed("the server's challenge is not DIGEST-MD5")))?;
                message::sasl(2, answer.text.as_bytes(), &mut writer);
                let judged = self.token(place, &writer).await.map_err(|error| {
                    if hung_up(&error) { denied(place).with_source(error) } else { error }
                })?;
                if answer.is_proven_by(&judged) { Ok(()) } else { Err(unproven(place)) }
            }
        }
    }

    /// One step of SASL.
    async fn token(&mut self, place: &Place, writer: &Writer) -> Result<Vec<u8>, Error> {
        self.put(place, writer).await?;
        let frame = self.frame(place).await?;
        let mut reader = Reader::new(&frame);
        accepted(place, &mut reader)?;
        let token = reader.buffer().map_err(|malformed| stranger(place, malformed))?;
        Ok(token.to_vec())
    }

    async fn put(&mut self, place: &Place, writer: &Writer) -> Result<(), Error> {
        self.writer.write_all(writer.bytes()).await.map_err(|error| broken(place, error))?;
        self.writer.flush().await.map_err(|error| broken(place, error))
    }

    /// Waits for the next message.
    ///
    /// # Cancel safety
    ///
    /// Nothing is lost with a call that is dropped.
    async fn frame(&mut self, place: &Place) -> Result<Vec<u8>, Error> {
        loop {
            if let Some(frame) = self.frames.next().map_err(|malformed| stranger(place, malformed))? {
                return Ok(frame.to_vec());
            }
            match self.frames.fill(&mut self.reader).await {
                Ok(true) => {}
                Ok(false) => return Err(broken(place, io::ErrorKind::UnexpectedEof.into())),
                Err(error) => return Err(broken(place, error)),
            }
        }
    }
}

/// A server that does not like the password closes the connection without a word. One that broke is another matter.
fn hung_up(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof)
}

fn accepted(place: &Place, reader: &mut Reader<'_>) -> Result<(), Error> {
    let header = Header::read(reader).map_err(|malformed| stranger(place, malformed))?;
    match Code::of(header.error) {
        None => Ok(()),
        Some(code) => Err(denied(place).with_source(code)),
    }
}

/// Returns what a server answers to a command of four letters; nothing if it cannot be asked.
pub(crate) async fn four_letters(
    word: &str,
    place: &Place,
    limit: Duration,
    clock: &dyn Clock,
) -> Option<String> {
    const MOST: u64 = 16 << 10;
    let asked = async {
        let mut stream = dial(&place.host, place.port, limit, clock).await.ok()?;
        stream.write_all(word.as_bytes()).await.ok()?;
        let mut said = String::new();
        stream.take(MOST).read_to_string(&mut said).await.ok()?;
        Some(said)
    };
    within(clock, limit, asked).await.flatten()
}

fn unreachable(place: &Place, error: io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("cannot reach {place}")).with_source(error)
}

fn broken(place: &Place, error: io::Error) -> Error {
    let message = format!("{place} broke the connection before it granted a session");
    Error::new(ErrorKind::Unavailable, message).with_source(error)
}

fn silent(place: &Place, limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{place} did not grant a session within {limit:?}"))
}

fn denied(place: &Place) -> Error {
    Error::new(ErrorKind::Denied, format!("{place} refused the credentials: check the user and its password"))
}

/// The server let us in without showing that it knows the password.
fn unproven(place: &Place) -> Error {
    let message = format!(
        "{place} does not prove that it knows the password: check that it is the right server, and use TLS"
    );
    Error::new(ErrorKind::Denied, message)
}

fn refused(place: &Place, error: io::Error) -> Error {
    let kind = match error.kind() {
        // What rustls does not accept: a certificate, or no TLS at all.
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => ErrorKind::Config,
        _ => ErrorKind::Unavailable,
    };
    let message = format!("no TLS with {place}: check its certificate, the authority and the port");
    Error::new(kind, message).with_source(error)
}

fn stranger(place: &Place, malformed: Malformed) -> Error {
    let message =
        format!("{place} does not answer as a ZooKeeper does: check the port, and whether it wants TLS");
    Error::new(ErrorKind::Protocol, message).with_source(malformed)
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[tokio::test]
    async fn what_is_behind_the_question_is_written_though_the_answer_is_there() {
        let (near, mut far) = duplex(1 << 10);
        let (reader, writer) = tokio::io::split(near);
        let mut wire = Wire::of(reader, writer, Moment::ZERO);
        let mut answer = Writer::default();
        answer.frame(|w| {
            w.int(0).int(1_000).long(7).buffer(&[1; 16]);
        });
        far.write_all(answer.bytes()).await.unwrap();
        let (to, behind) = tokio::sync::mpsc::unbounded_channel();
        let mut more = Writer::default();
        more.frame(|w| {
            w.text("behind");
        });
        to.send(more).unwrap();
        let (place, life) = (Place { host: "h".into(), port: 1 }, Life::default());
        let granted = wire.shake(&place, &life, 1_000, behind).await.unwrap();
        assert_eq!(granted.session, 7);
        drop(wire);
        let mut written = Vec::new();
        far.read_to_end(&mut written).await.unwrap();
        assert!(written.ends_with(b"behind"), "{written:?}");
    }
}
