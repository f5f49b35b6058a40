//! Rust source cut into the few kinds of token that the layer rules look at.

/// One token with the line it stands on, counted from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub line: usize,
    pub kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A name or keyword; a raw name (`r#node`) without its mark.
    Word(String),
    /// The contents of a string literal, as written.
    Text(String),
    /// Any other character that is not white space, one token each.
    Mark(char),
}

impl Token {
    pub fn word(&self) -> Option<&str> {
        match &self.kind {
            Kind::Word(w) => Some(w),
            _ => None,
        }
    }

    pub fn is_word(&self, word: &str) -> bool {
        self.word() == Some(word)
    }

    pub fn is_mark(&self, mark: char) -> bool {
        self.kind == Kind::Mark(mark)
    }
}

/// Cuts `text` into tokens; comments (nested ones too), character literals and lifetimes are left out.
pub fn tokens(text: &str) -> Vec<Token> {
    let mut lexer = Lexer { chars: text.chars().collect(), at: 0, line: 1, out: Vec::new() };
    while lexer.at < lexer.chars.len() {
        lexer.one();
    }
    lexer.out
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    line: usize,
    out: Vec<Token>,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> char {
        self.chars.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn bump(&mut self) -> char {
        let c = self.peek(0);
        self.at += 1;
        self.line += usize::from(c == '\n');
        c
    }

    fn push(&mut self, line: usize, kind: Kind) {
        self.out.push(Token { line, kind });
    }

    fn one(&mut self) {
        let line = self.line;
        match self.peek(0) {
            '/' if self.peek(1) == '/' => {
                while self.at < self.chars.len() && self.peek(0) != '\n' {
                    self.bump();
                }
            }
            '/' if self.peek(1) == '*' => self.block_comment(),
            '"' => self.string(line),
            '\'' => self.character_or_lifetime(),
            c if c.is_alphabetic() || c == '_' => self.word_or_raw_string(line),
            // Digits are eaten as a word so that the `u8` of `1u8` is not a name of its own.
            c if c.is_ascii_digit() => {
                while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
                    self.bump();
                }
            }
            _ => {
                let c = self.bump();
                if !c.is_whitespace() {
                    self.push(line, Kind::Mark(c));
                }
            }
        }
    }

    fn block_comment(&mut self) {
        let mut depth = 0;
        while self.at < self.chars.len() {
            match (self.peek(0), self.peek(1)) {
                ('/', '*') => depth += 1,
                ('*', '/') => depth -= 1,
                _ => {
                    self.bump();
                    continue;
                }
            }
            self.bump();
            self.bump();
            if depth == 0 {
                return;
            }
        }
    }

    fn string(&mut self, line: usize) {
        self.bump();
        let mut text = String::new();
        while self.at < self.chars.len() {
            match self.bump() {
                '"' => break,
                '\\' => {
                    text.push('\\');
                    text.push(self.bump());
                }
                c => text.push(c),
            }
        }
        self.push(line, Kind::Text(text));
    }

    fn raw_string(&mut self, line: usize, hashes: usize) {
        for _ in 0..=hashes {
            self.bump();
        }
        let mut text = String::new();
        while self.at < self.chars.len() {
            let c = self.bump();
            if c == '"' && (0..hashes).all(|i| self.peek(i) == '#') {
                self.at += hashes;
                break;
            }
            text.push(c);
        }
        self.push(line, Kind::Text(text));
    }

    fn character_or_lifetime(&mut self) {
        self.bump();
        if self.peek(0) == '\\' {
            self.bump();
            self.bump();
            while self.at < self.chars.len() && self.bump() != '\'' {}
        } else if self.peek(1) == '\'' {
            self.bump();
            self.bump();
        } else {
            while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
                self.bump();
            }
        }
    }

    fn word_or_raw_string(&mut self, line: usize) {
        let mut word = String::new();
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            word.push(self.bump());
        }
        let hashes = self.chars[self.at..].iter().take_while(|c| **c == '#').count();
        match word.as_str() {
            "r" | "br" | "cr" if self.peek(hashes) == '"' => self.raw_string(line, hashes),
            "b" | "c" if self.peek(0) == '"' => self.string(line),
            "b" if self.peek(0) == '\'' => self.character_or_lifetime(),
            "r" if hashes == 1 => {
                self.bump();
                self.word_or_raw_string(line);
            }
            _ => self.push(line, Kind::Word(word)),
        }
    }
}
