use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use simba_core::Error;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::filter::LevelFilter;

/// Captured logs. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Logs(Arc<Mutex<Vec<u8>>>);

impl Logs {
    /// Captures all logs of this process from the first call on, at every level and also of dependencies that use the
    /// `log` crate. Every call returns the same logs.
    #[must_use]
    pub fn capture() -> Self {
        static LOGS: OnceLock<Logs> = OnceLock::new();
        let install = || {
            let logs = Self::default();
            let writer = logs.clone();
            let subscriber = tracing_subscriber::fmt()
                .with_max_level(LevelFilter::TRACE)
                .with_ansi(false)
                .with_writer(move || writer.clone())
                .finish();
            tracing::subscriber::set_global_default(subscriber).expect("no other subscriber is set");
            log::set_boxed_logger(Box::new(logs.clone())).expect("no other logger is set");
            log::set_max_level(log::LevelFilter::Trace);
            logs
        };
        LOGS.get_or_init(install).clone()
    }

    /// Captures the logs of this thread until the guard is dropped, which is everything in a current-thread runtime.
    #[must_use]
    pub fn capture_thread() -> (Self, DefaultGuard) {
        let logs = Self::default();
        let writer = logs.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        (logs, tracing::subscriber::set_default(subscriber))
    }

    /// Returns what was logged so far.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }

    /// Returns how often a text was logged so far.
    #[must_use]
    pub fn count(&self, text: &str) -> usize {
        self.text().matches(text).count()
    }

    /// Checks that neither the logs nor these texts contain a secret, and that something was logged.
    pub fn assert_without(&self, secret: &str, texts: &[String]) {
        let logged = self.text();
        assert!(logged.contains("simba_"), "something was logged");
        log::trace!("through the log crate");
        assert!(self.text().contains("through the log crate"), "the output of the log crate is captured");
        for text in texts.iter().chain([&logged]) {
            assert!(!text.contains(secret), "a secret is shown: {text}");
        }
    }
}

impl io::Write for Logs {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl log::Log for Logs {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {} {}\n", record.level(), record.target(), record.args());
        let _ = io::Write::write(&mut self.clone(), line.as_bytes());
    }

    fn flush(&self) {}
}

/// Returns an error with its sources, in all formats.
#[must_use]
pub fn error_text(error: &Error) -> String {
    let mut text = format!("{error} {error:?} {error:#?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(" {cause} {cause:?}");
        source = cause.source();
    }
    text
}
