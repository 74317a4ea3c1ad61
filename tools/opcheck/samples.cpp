// Finds the sample arguments of an operator in the tables.
#include "tools/opcheck/sample.hpp"

#include <map>
#include <sstream>

namespace dtensor::opcheck {

namespace {

// Names and samples of one line.
void add_line(const std::string& line, std::map<std::string, std::vector<std::string>>& table) {
  const auto colon = line.find(": ");
  if (line.empty() || line[0] == '#' || colon == std::string::npos) return;
  std::vector<std::string> texts;
  std::istringstream samples(line.substr(colon + 2));
  for (std::string text; std::getline(samples, text, '|');) texts.push_back(text);
  std::istringstream names(line.substr(0, colon));
  for (std::string name; names >> name;) table[name] = texts;
}

std::map<std::string, std::vector<std::string>> read_table() {
  std::map<std::string, std::vector<std::string>> table;
  for (const char* some : {common_samples(), rare_samples()}) {
    std::istringstream lines(some);
    for (std::string line; std::getline(lines, line);) add_line(line, table);
  }
  return table;
}

}  // namespace

std::vector<std::string> texts_of(const std::string& base) {
  static const auto table = read_table();
  const auto it = table.find(base);
  return it == table.end() ? std::vector<std::string>() : it->second;
}

std::vector<std::string> general_texts() {
  return {"*=[5,3]",       "*=[5,3]u",           "*=[5,4]t",  "*=[4,3,6]",  "*=[5,3] other=[3]", "*=[5,3]+", "self=[5,1] other=[3]",
          "*=[]",          "*=[0,3]",            "*=[7]",     "*=[4,4]d",   "*=[3,4,4]d",        "*=[2,4,6,5]", "*=[5,3]i",
          "*=[5,3]?",      "*=[5,3]c"};
}

}  // namespace dtensor::opcheck
