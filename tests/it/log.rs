//! Records the log events of the library in this process.

use std::sync::{Mutex, OnceLock, PoisonError};

/// A subscriber that records events.
pub struct Log(Mutex<Vec<String>>);

struct Text(String);

impl tracing::field::Visit for Text {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!("{}={value:?} ", field.name()));
    }
}

impl tracing::Subscriber for &'static Log {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = Text(format!("{} ", event.metadata().level()));
        event.record(&mut text);
        text.0.push_str(&format!("[{}]", std::thread::current().name().unwrap_or_default()));
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(text.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// The recorded events whose text contains `part`.
pub fn logged_with(part: &str) -> Vec<String> {
    let lines = log().0.lock().unwrap_or_else(PoisonError::into_inner);
    lines.iter().filter(|line| line.contains(part)).cloned().collect()
}

pub fn log() -> &'static Log {
    static LOG: OnceLock<&'static Log> = OnceLock::new();
    LOG.get_or_init(|| {
        let log: &'static Log = Box::leak(Box::new(Log(Mutex::default())));
        tracing::subscriber::set_global_default(log).expect("the only subscriber of this process");
        log
    })
}
